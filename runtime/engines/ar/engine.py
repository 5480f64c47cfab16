"""Engine `ar`: autoregressive generation on vLLM. One `step` of ours is one engine step of vLLM, over all requests.

Owns the life of a request at this stage: waits until its input is complete, lets the program make the prompt, hands it
to vLLM's scheduler, turns what comes back into payloads and one end. compat.py knows vLLM; the program knows the model
family. Called by the stage loop, from one thread.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runtime.engines.ar.program import ArProgram, Eager, Generated, Prompt
from runtime.engines.ar.sampling import Sampling
from runtime.engines.ar.settings import engine_arguments
from runtime.engines.ar.split import Prefix, block_payloads, forwarded, summary
from runtime.engines.base import End, LoadContext, StageOutput, StageWork
from runtime.errors import ConfigError, EnvironmentProblem, InvalidRequest, OmniError, StageError, WeightsError
from runtime.payload import Payload
from runtime.plan import PayloadKind
from runtime.programs import load_program

if TYPE_CHECKING:
    from runtime.engines.ar.compat import Core, CoreOutput

log = logging.getLogger(__name__)

SEED_BITS = 53
"""Fresh seeds fit into a JSON number."""
TEMPLATE = "chat template"
"""What the tokens that are nobody's part belong to."""
NUM_PARTS_NAMED = 8
"""Parts of a prompt that is too long that its error names."""
PREFILL = Sampling(temperature=0.0, max_tokens=1)
"""Of a producer: its one token is nobody's, the consumer samples all of them."""


@dataclass(slots=True)
class _Request:
    """In the engine once it is started; before that it waits for `missing` inputs, then for a step."""

    state: Any
    missing: set[str]
    started: bool = False
    prompt_token_ids: list[int] = field(default_factory=list)
    prefix: Prefix | None = None
    """Of a consumer, until it is started: what came from its producer."""
    num_media_tokens: int = 0
    """Of the prompt."""
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    seed: int | None = None

    @property
    def usage(self) -> dict[str, float]:
        media = {"media_tokens": self.num_media_tokens} if self.num_media_tokens else {}
        return {
            "prompt_tokens": len(self.prompt_token_ids),
            "completion_tokens": self.num_completion_tokens,
            "cached_tokens": self.num_cached_tokens,
            **media,
        }


class ArEngine:
    def __init__(self, core: Core, program: ArProgram) -> None:
        self.core, self.program = core, program
        self._requests: dict[str, _Request] = {}
        self._ready: dict[str, None] = {}
        """Ids, in order, whose input is complete and that vLLM has not got yet."""
        self._forwarded: list[StageOutput] = []
        """Of a producer: inputs that the next step hands on."""
        self._failed: list[StageOutput] = []
        """Ends that came up outside of vLLM: nearly always errors."""
        self._counters = {"prompt_tokens": 0, "generated_tokens": 0, "cached_tokens": 0, "steps": 0}

    def submit(self, work: StageWork) -> None:
        with self._faults_of(work.request_id, "could not be opened"):
            prefix = Prefix() if self.core.role == "consumer" else None
            self._requests[work.request_id] = _Request(self.program.open(work), set(work.inputs), prefix=prefix)

    def feed(self, request_id: str, payload: Payload) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        with self._faults_of(request_id, "could not take its input"):
            self._take(request, payload)
            if payload.last:
                request.missing.discard(payload.edge)
            if not request.started and (not request.missing or self._begins(request)):
                self._ready[request_id] = None

    def _take(self, request: _Request, payload: Payload) -> None:
        """An input, which a producer hands on as well, or what a producer sends."""
        if request.prefix is not None and payload.kind == PayloadKind.KV_BLOCKS:
            original = request.prefix.take(payload)
            if original is not None:
                self.program.feed(request.state, original)
            return
        self.program.feed(request.state, payload)
        if self.core.role == "producer":
            self._forwarded.append(StageOutput(payload.request_id, forwarded(payload)))

    def _begins(self, request: _Request) -> bool:
        return isinstance(self.program, Eager) and self.program.begins(request.state)

    def consumed(self, request_id: str) -> bool:
        """Always: programs keep what they need of a piece when they are fed it."""
        return True

    def hold(self, request_ids: frozenset[str]) -> None:
        self.core.hold(request_ids)

    def abort(self, request_id: str) -> None:
        self._failed = [output for output in self._failed if output.request_id != request_id]
        self._forwarded = [output for output in self._forwarded if output.request_id != request_id]
        self._forget(request_id)

    def step(self) -> list[StageOutput]:
        """Raises only when vLLM's engine broke: the process has to be replaced, every request of it is lost."""
        for request_id in list(self._ready):
            with self._faults_of(request_id, "could not be started"):
                self._start(request_id)
        outputs, self._forwarded = self._forwarded, []
        if self.core.has_work():
            self._counters["steps"] += 1
            generated = self.core.step()
            for request_id, blocks in self.core.take_saved():
                outputs += [StageOutput(request_id, piece) for piece in block_payloads(request_id, blocks)]
            for output in generated:
                with self._faults_of(output.request_id, "could not deliver its output"):
                    outputs += self._deliver(output)
        failed, self._failed = self._failed, []
        return outputs + failed

    def next_step_s(self) -> float | None:
        return 0.0 if self._failed or self._forwarded or self._ready or self.core.has_work() else None

    def stats(self) -> Mapping[str, float]:
        running, _ = self.core.counts
        return {
            "queued": len(self._requests) - running,
            "running": running,
            "kv_blocks_used": self.core.num_kv_blocks[0],
            "preemptions": self.core.num_preemptions,
            "held": self.core.num_held,
            "computed_tokens": self.core.num_computed_tokens,
            "loaded_tokens": self.core.num_loaded_tokens,
            **self._counters,
        }

    def facts(self) -> Mapping[str, Any]:
        return {**self.core.facts(), **self.program.facts()}

    def close(self) -> None:
        self._requests.clear()
        self.program.close()
        self.core.close()

    def _start(self, request_id: str) -> None:
        """Make the prompt and queue it in vLLM. A request that samples without a seed gets a fresh one."""
        request = self._requests[request_id]
        prompt = self.program.prompt(request.state, self.core.tokenizer)
        if prompt is None:
            self._forget(request_id)
            self._failed.append(StageOutput(request_id, end=End(usage=request.usage)))
            return
        self._check_length(request, len(prompt.token_ids), {})
        rendered = self.core.render(prompt)
        self._check_length(request, len(rendered.token_ids), rendered.num_media_tokens)
        request.prompt_token_ids = list(rendered.token_ids)
        request.num_media_tokens = sum(rendered.num_media_tokens.values())
        prefix, request.prefix = request.prefix, None
        if prefix is not None:
            prefix.check(rendered.token_ids, self.core.block_size)
            request.num_cached_tokens = prefix.num_cached_tokens
        self.core.add(request_id, rendered, prompt, self._sampling(request, prompt), prefix)
        del self._ready[request_id]
        request.started = True
        self._counters["prompt_tokens"] += len(rendered.token_ids)

    def _sampling(self, request: _Request, prompt: Prompt) -> Sampling:
        if self.core.role == "producer":
            return PREFILL
        if prompt.sampling.temperature == 0:
            return prompt.sampling
        request.seed = secrets.randbits(SEED_BITS) if prompt.sampling.seed is None else prompt.sampling.seed
        return dataclasses.replace(prompt.sampling, seed=request.seed)

    def _check_length(self, request: _Request, num_tokens: int, by_medium: Mapping[str, int]) -> None:
        limit = self.core.max_model_len - 1
        if num_tokens <= limit:
            return
        by_part = {**self.program.num_tokens_by_part(request.state, self.core.tokenizer), **by_medium}
        by_part[TEMPLATE] = num_tokens - sum(by_part.values())
        parts = tuple(f"{name}: {count} tokens" for name, count in sorted(by_part.items(), key=lambda p: -p[1]))
        more = f", and {len(parts) - NUM_PARTS_NAMED} more parts" if len(parts) > NUM_PARTS_NAMED else ""
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens; the limit is {limit}, which leaves one for the answer "
            f"({', '.join(parts[:NUM_PARTS_NAMED])}{more})",
            hint="shorten the longest part, or leave out earlier messages",
            param="messages",
            problems=parts,
        )

    def _deliver(self, output: CoreOutput) -> list[StageOutput]:
        request = self._requests.get(output.request_id)
        if request is None:
            return []
        if output.reason not in (None, "stop", "length"):
            raise StageError(f"generation ended with {output.reason!r} after {request.num_completion_tokens} tokens")
        if not request.num_completion_tokens and self.core.role != "consumer":
            request.num_cached_tokens = output.num_cached_tokens
            self._counters["cached_tokens"] += output.num_cached_tokens
        if self.core.role == "producer":
            return self._hand_over(output.request_id, self._requests.pop(output.request_id))
        request.num_completion_tokens += len(output.token_ids)
        self._counters["generated_tokens"] += len(output.token_ids)
        generated = Generated(output.text, output.token_ids, request.seed, output.tensors)
        payloads = self.program.payloads(request.state, generated)
        outputs = [StageOutput(output.request_id, payload=payload) for payload in payloads]
        if output.reason is not None:
            del self._requests[output.request_id]
            end = End(output.reason, request.usage, began_s=self.core.take_began_s(output.request_id))
            outputs.append(StageOutput(output.request_id, end=end))
        return outputs

    def _hand_over(self, request_id: str, request: _Request) -> list[StageOutput]:
        payload = summary(request_id, request.prompt_token_ids, request.num_cached_tokens)
        end = End(usage=request.usage, began_s=self.core.take_began_s(request_id))
        return [StageOutput(request_id, payload), StageOutput(request_id, end=end)]

    @contextmanager
    def _faults_of(self, request_id: str, what: str) -> Iterator[None]:
        """What goes wrong with one request ends that request, not the stage."""
        try:
            yield
        except OmniError as exc:
            self._fail(request_id, exc)
        except Exception:
            log.exception("request %s %s", request_id, what)
            self._fail(request_id, StageError(f"the request {what}; see the stage's log"))

    def _fail(self, request_id: str, error: OmniError) -> None:
        self._forget(request_id)
        self._failed.append(StageOutput(request_id, end=End(error=error)))

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        self._ready.pop(request_id, None)
        if request is not None and request.started:
            self.core.abort(request_id)


def load(context: LoadContext) -> ArEngine:
    """ConfigError, WeightsError or EnvironmentProblem that names the stage when it cannot be loaded."""
    name = context.stage.name
    program: ArProgram = load_program(context)
    arguments = engine_arguments(context, program.arguments())
    context.progress("importing vllm")
    core_class = _import_core(name)
    context.progress("loading the model")
    try:
        core = core_class(arguments, context.num_threads, context.stage.engine_settings.get("kv_role"))
    except (ConfigError, WeightsError) as exc:
        log.exception("stage %s: loading failed", name)
        exc.message = f"stage {name}: {exc.message}"
        raise
    return ArEngine(core, program)


def _import_core(stage: str) -> type[Core]:
    from runtime.engines.ar.environment import prepare_process

    try:
        prepare_process()
        from runtime.engines.ar.compat import Core
    except ImportError as exc:
        raise EnvironmentProblem(
            f"stage {stage}: vllm cannot be imported: {exc}", hint="install it: pip install 'omnictl-serve[cpu]'"
        ) from exc
    return Core
