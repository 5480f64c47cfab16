"""Every touch of vLLM's inside is here, or in compat_*.py for model runners and schedulers;
tests/golden/test_ar_compat.py, test_ar_hidden.py and test_ar_gate.py fail when vLLM changes one.

`Core` is one vLLM engine in this process: scheduler, paged KV cache and model runner, driven step by step.
Knows no stages and no programs. Imported by engine.py after environment.prepare_process().
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import vllm
from pydantic import ValidationError
from torch.distributed import ProcessGroupGloo, distributed_c10d
from transformers import TokenizersBackend
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMServerError
from vllm.model_executor.models import registry
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

from runtime.engines.ar.compat_kv import connector_arguments, engine_turn, installed_connector
from runtime.engines.ar.compat_runner import HiddenTap
from runtime.engines.ar.compat_scheduler import REQUEST_ID, WANTS_ROWS, GatedScheduler, StageScheduler
from runtime.engines.ar.inputs import InputRows
from runtime.engines.ar.program import Prompt
from runtime.engines.ar.sampling import Sampling
from runtime.engines.ar.split import Blocks, Prefix, Role
from runtime.errors import (
    ConfigError,
    EnvironmentProblem,
    InvalidRequest,
    OmniError,
    Overloaded,
    StageError,
    WeightsError,
)

VERSION = "0.32.0"
RETRY_AFTER_S = 1.0
MAX_REASON_CHARS = 400
"""vLLM's reasons may list every model that it knows."""
SETTINGS_HINT = "change the stage's engine_settings or its cache with --set, or in the recipe"


FIXED_ARGUMENTS: dict[str, Any] = {
    "scheduler_cls": StageScheduler,
    "async_scheduling": False,  # a step returns the tokens that it made
    # the plan has summed up what a device holds; vLLM would refuse to start beside another stage that holds its share
    "gpu_memory_utilization": 0.01,
    "use_tqdm_on_load": False,
}


@dataclass(frozen=True, slots=True)
class CoreOutput:
    """What a step gave for one request. reason: None while it goes on, else stop, length or error."""

    request_id: str
    text: str
    token_ids: list[int]
    num_cached_tokens: int
    reason: str | None
    tensors: Mapping[str, torch.Tensor]
    """What the model runner tapped for these tokens, if it taps."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt in vLLM's form, media preprocessed. token_ids: each placeholder as long as its medium."""

    token_ids: list[int]
    engine_input: Any
    num_media_tokens: Mapping[str, int] = field(default_factory=dict)
    """By medium: image[0], image[1], audio[0] ..."""


class Core:
    """Not thread-safe. An exception out of `step` means that the engine is broken for good."""

    def __init__(self, arguments: Mapping[str, Any], num_threads: int, role: Role | None = None) -> None:
        """arguments: of vLLM's EngineArgs. role: which half of a split stage this is, if it is one.

        ConfigError or WeightsError when the model cannot be loaded so.
        """
        check_version()
        _inspect_models_in_process()
        _share_tokenizers()
        distributed_c10d.ProcessGroupGloo = QuietGloo
        torch.set_num_threads(num_threads)
        arguments = {**FIXED_ARGUMENTS, **arguments, **(connector_arguments(role) if role else {})}
        if role and arguments["scheduler_cls"] is not StageScheduler:
            raise ConfigError(f"kv_role {role!r}: a stage that is fed with rows beside its tokens cannot be split")
        with (
            engine_turn(),
            load_errors(str(arguments["model"]), arguments.get("kv_cache_memory_bytes")),
            warnings.catch_warnings(),
        ):
            # vLLM looks at every name in torch's namespace, this deprecated one too
            warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)
            config = EngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
            self._engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
            self._connector = installed_connector()
        self.role = role
        self._core = self._engine.engine_core.engine_core
        self._scheduler: StageScheduler = self._core.scheduler
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        if role and isinstance(self._runner, HiddenTap):
            self._connector.rows = self._runner.store
        self._tapped: dict[str, dict[str, torch.Tensor]] = getattr(self._runner, "tapped", {})
        self._inputs: dict[str, InputRows] = {}
        if isinstance(self._scheduler, GatedScheduler):
            self._scheduler.inputs = self._runner.inputs = self._inputs

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of the model's folder; None for a model that is loaded without."""
        return None if self._engine.model_config.skip_tokenizer_init else self._engine.get_tokenizer()

    @property
    def max_model_len(self) -> int:
        return int(self._engine.model_config.max_model_len)

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    @property
    def num_held(self) -> int:
        """Requests that waited for an input row or for room for their output, summed over steps."""
        return self._scheduler.num_held

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that went through the model."""
        return self._scheduler.num_computed_tokens

    @property
    def num_loaded_tokens(self) -> int:
        """Tokens whose keys and values another engine computed."""
        return self._scheduler.connector.num_loaded_tokens if self.role else 0

    @property
    def block_size(self) -> int:
        return int(self._engine.vllm_config.cache_config.block_size)

    @property
    def counts(self) -> tuple[int, int]:
        """(running, waiting)"""
        return self._scheduler.get_request_counts()

    @property
    def num_kv_blocks(self) -> tuple[int, int]:
        """(used by requests, all) of the KV cache; those that only keep a prefix for later count as free."""
        pool = self._scheduler.kv_cache_manager.block_pool
        num_blocks = pool.num_gpu_blocks - 1  # one is a filler of vLLM's
        return num_blocks - pool.get_num_free_blocks(), num_blocks

    def render(self, prompt: Prompt) -> Rendered:
        """Preprocess a prompt's media. InvalidRequest when vLLM refuses them."""
        if not prompt.media:
            token_ids = list(prompt.token_ids)
            return Rendered(token_ids, {"type": "token", "prompt_token_ids": token_ids})
        given = {
            "prompt_token_ids": list(prompt.token_ids),
            "multi_modal_data": dict(prompt.media),
            "mm_processor_kwargs": dict(prompt.media_options),
        }
        with translated():
            (engine_input,) = self._engine.renderer.render_cmpl([given])
        num_tokens = {
            f"{modality}[{number}]": place.get_num_embeds()
            for modality, places in engine_input["mm_placeholders"].items()
            for number, place in enumerate(places)
        }
        return Rendered(list(engine_input["prompt_token_ids"]), engine_input, num_tokens)

    def add(
        self,
        request_id: str,
        rendered: Rendered,
        prompt: Prompt,
        sampling: Sampling,
        prefix: Prefix | None = None,
    ) -> None:
        """Queue a generation, whose prompt another engine may have computed.

        InvalidRequest when vLLM refuses it, which then leaves nothing behind.
        """
        params = _sampling_params(sampling)
        params.extra_args = {REQUEST_ID: request_id, WANTS_ROWS: prompt.wants_rows}
        params.stop_token_ids, params.detokenize = list(prompt.stop_token_ids), prompt.inputs is None
        if prompt.inputs is not None:
            self._inputs[request_id] = prompt.inputs
            prompt.inputs.seed(sampling.seed if sampling.temperature > 0 else None)
        if prefix is not None:
            self._scheduler.connector.prefixes[request_id] = prefix
        with translated():
            try:
                self._engine.add_request(request_id, rendered.engine_input, params)
            except Exception:
                self.abort(request_id)
                raise

    def abort(self, request_id: str) -> None:
        self._engine.abort_request([request_id])
        self._tapped.pop(request_id, None)
        self._scheduler.began_s.pop(request_id, None)
        self._inputs.pop(request_id, None)
        if self.role:
            self._scheduler.connector.prefixes.pop(request_id, None)

    def hold(self, request_ids: frozenset[str]) -> None:
        """No steps for these until the next call."""
        self._scheduler.held = request_ids

    def take_began_s(self, request_id: str) -> float | None:
        """When the first step on a request was; None when there was none."""
        return self._scheduler.began_s.pop(request_id, None)

    def has_work(self) -> bool:
        """False when every request has to wait. See the schedulers' `can_step`."""
        return self._scheduler.can_step()

    def step(self) -> list[CoreOutput]:
        with engine_turn(self._connector):
            stepped = self._engine.step()
        outputs = [
            CoreOutput(
                request_id=output.request_id,
                text=output.outputs[0].text,
                token_ids=list(output.outputs[0].token_ids),
                num_cached_tokens=output.num_cached_tokens or 0,
                reason=output.outputs[0].finish_reason,
                tensors=self._tapped.pop(output.request_id, {}),
            )
            for output in stepped
        ]
        for output in outputs:
            if output.reason is not None:
                self._inputs.pop(output.request_id, None)
        return outputs

    def take_saved(self) -> list[tuple[str, Blocks]]:
        """Of a producer: request ids and blocks of their prompts that the last step completed."""
        return self._connector.take_saved() if self.role else []

    def facts(self) -> dict[str, Any]:
        config = self._engine.vllm_config
        split = {"kv_layout": self._connector.layout()} if self.role else {}
        return {
            "vllm_version": vllm.__version__,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "num_kv_tokens": config.cache_config.kv_cache_size_tokens,
            "num_kv_blocks": self.num_kv_blocks[1],
            "attention_backend": self._runner.attn_groups[0][0].backend.get_name(),
            **split,
        }

    def close(self) -> None:
        """Free the model and the KV cache."""
        with engine_turn():
            self._engine.engine_core.shutdown()
            self._engine.renderer.shutdown()


class QuietGloo(ProcessGroupGloo):
    """WHY: each process group of gloo has a thread that wakes up a hundred times a second, and an engine has seven of
    them even when it is alone: two percent of a core while nothing is asked. These share one thread.
    SCOPE: torch 2.13, vLLM 0.32. REMOVE WHEN: gloo waits without a timeout, or vLLM makes no groups for one process.
    """

    _device: Any = None

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        QuietGloo._device = QuietGloo._device or ProcessGroupGloo.create_default_device()
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [QuietGloo._device], timeout
        super().__init__(store, rank, size, options)


def check_version() -> None:
    """EnvironmentProblem unless vLLM is the version whose inside this file knows."""
    if vllm.__version__ != VERSION:
        raise EnvironmentProblem(
            f"vllm {vllm.__version__} is installed; this release works with {VERSION} only",
            hint="reinstall with `make install`, or pip install 'omnictl-serve[cpu]'",
        )


@contextmanager
def load_errors(folder: str, cache_bytes: int | None) -> Iterator[None]:
    """What vLLM raises for settings becomes ConfigError, for files WeightsError.

    It raises ValueError for both; what it says about settings it says while it validates them, or about the cache.
    """
    try:
        yield
    except ValidationError as exc:
        reason = "; ".join(error["msg"].removeprefix("Value error, ") for error in exc.errors())
        raise ConfigError(f"vLLM refuses the settings: {_shortened(reason)}", hint=SETTINGS_HINT) from exc
    except OmniError:
        raise
    except NotImplementedError as exc:
        raise ConfigError(f"vLLM cannot do this here: {_shortened(str(exc))}", hint=SETTINGS_HINT) from exc
    except Exception as exc:
        if isinstance(exc, ValueError) and "kv cache" in str(exc).lower():
            reason = str(exc).partition(" Try increasing")[0]
            raise ConfigError(f"cache budget of {cache_bytes} bytes: {reason}", hint=SETTINGS_HINT) from exc
        raise WeightsError(
            f"{folder} cannot be loaded: {type(exc).__name__}: {_shortened(str(exc))}",
            hint="fetch the weights again with `omnictl pull`",
        ) from exc


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_REASON_CHARS else text[:MAX_REASON_CHARS] + " ..."


@contextmanager
def translated() -> Iterator[None]:
    """vLLM's errors about one request as ours. A dead engine is nobody's request: that error passes."""
    try:
        yield
    except EngineDeadError:
        raise
    except VLLMClientError as exc:
        raise InvalidRequest(str(exc), param=getattr(exc, "parameter", None)) from exc
    except GracefulHTTPError as exc:
        raise Overloaded(str(exc), retry_after_s=RETRY_AFTER_S) from exc
    except VLLMServerError as exc:
        raise StageError(f"vLLM could not serve the request: {exc}") from exc


def _sampling_params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def _inspect_models_in_process() -> None:
    """WHY: vLLM imports itself again in a child process only to look at the model class: seconds of every first start,
    and the child lacks our torchvision operators. It does so to keep CUDA out of a parent that forks; we do not fork.
    SCOPE: vLLM 0.32. REMOVE WHEN: vLLM has a setting for it.
    """
    registry._run_in_subprocess = lambda inspect: inspect()


def _share_tokenizers() -> None:
    """WHY: while a multimodal model is loaded its tokenizer is copied four times, deeply: with 150,000 tokens, seconds
    and hundreds of megabytes. Nobody changes a copy, and a stage uses its tokenizer from one thread.
    SCOPE: vLLM 0.32, transformers 5.19. REMOVE WHEN: no deep copies are made.
    """
    TokenizersBackend.__deepcopy__ = lambda self, memo: self
