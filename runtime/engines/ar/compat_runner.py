"""Model runners of vLLM that hand out hidden states, or take input rows of our own.

`HiddenTap` and `RowInputs` are mixed into a V1 model runner, CPU or GPU, and know neither; SlotStore and InputRows do
the work. A runner of the second generation would call the same from its ModelState. tests/golden/test_ar_hidden.py and
test_ar_gate.py fail when vLLM changes what is used here. vLLM loads the workers by name: program.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from runtime.engines.ar.compat_scheduler import REQUEST_ID, WANTS_ROWS
from runtime.engines.ar.hidden import SlotStore
from runtime.engines.ar.inputs import InputRows
from runtime.errors import ConfigError


class HiddenTap:
    """Keeps the input embedding and the output of one layer, or of the whole model, for every token in the KV cache.

    `tapped`: request id -> tensors of this step: "token_ids" [n], "embeddings" and "hidden" [n, hidden size]. The first
    step that samples gives those of the whole prompt, with "positions" [3, n] if the model has such, every later one
    those of the token that was sampled before.
    """

    store: SlotStore
    _num_tokens = 0

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        layer = self.vllm_config.additional_config["hidden_layer"]
        if layer is not None:
            self.model.set_aux_hidden_state_layers((layer,))
            self.use_aux_hidden_state_outputs = True
        self.tapped: dict[str, dict[str, torch.Tensor]] = {}

    def initialize_kv_cache(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        (group,) = kv_cache_config.kv_cache_groups
        block_size, table = group.kv_cache_spec.block_size, self.input_batch.block_table[0]
        if table.block_size != block_size:  # its entries are then numbers of smaller blocks
            raise ConfigError(
                f"block_size {block_size}: the attention of this device has blocks of {table.block_size}; a stage that "
                "hands out hidden states needs them equal",
                hint=f"set the stage's engine_settings.block_size to {table.block_size}",
            )
        shape = (kv_cache_config.num_blocks, block_size, 2, self.inputs_embeds_size)
        self.store = SlotStore(torch.zeros(shape, dtype=self.dtype, device=self.device))

    def _model_forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """WHY the copy: a fused kernel of the first layer may add into the embeddings' own memory."""
        embeddings = inputs_embeds if inputs_embeds is not None else self.model.embed_input_ids(input_ids)
        embeddings = embeddings[: self._num_tokens].clone()
        output = super()._model_forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)  # type: ignore[misc]
        hidden = output[1][-1] if self.use_aux_hidden_state_outputs else output
        slots = self.input_batch.block_table[0].slot_mapping.gpu[: self._num_tokens]
        self.store.put(slots, torch.stack([embeddings, hidden[: self._num_tokens]], 1))
        return output

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        state = self.execute_model_state
        if state is not None:
            self._tap(state.scheduler_output)
        return super().sample_tokens(grammar_output)  # type: ignore[misc]

    def _update_states(self: Any, scheduler_output: Any) -> Callable[..., Any] | None:
        for internal_id in scheduler_output.finished_req_ids:
            self.store.forget(internal_id)
        self.store.copy_blocks(scheduler_output.kv_cache_block_copies or ())
        self._num_tokens = scheduler_output.total_num_scheduled_tokens
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _tap(self: Any, scheduled: Any) -> None:
        batch = self.input_batch
        blocks = batch.block_table[0].get_cpu_tensor()
        for index, internal_id in enumerate(batch.req_ids):
            extra = self.requests[internal_id].sampling_params.extra_args
            end = int(batch.num_computed_tokens_cpu[index]) + scheduled.num_scheduled_tokens[internal_id]
            if not extra[WANTS_ROWS] or end < batch.num_tokens_no_spec[index]:
                continue
            taken = self.store.take(internal_id, blocks[index], end)
            if taken is not None:
                first, found = taken
                self.tapped[extra[REQUEST_ID]] = {
                    "token_ids": torch.from_numpy(batch.token_ids_cpu[index, first:end].copy()),
                    "embeddings": found[:, 0],
                    "hidden": found[:, 1],
                    **self._positions(internal_id, first),
                }

    def _positions(self: Any, internal_id: str, first: int) -> dict[str, torch.Tensor]:
        """Those of the prompt go out with it."""
        positions = self.requests[internal_id].mrope_positions
        return {} if first or positions is None else {"positions": positions}


class RowInputs:
    """Puts each request's own rows in, and lets the model complete each token that it sampled.

    The model has `complete(hidden, token_ids, generators)` -> codes [n, groups], rows [n, size]: what belongs to the
    tokens besides them, and what they are when they come in again. `tapped`: request id -> {"codes": [groups]} of this
    step. `inputs`: request id -> rows, shared with the scheduler.
    """

    inputs: Mapping[str, InputRows] = {}
    _num_scheduled: Mapping[str, int] = {}

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.tapped: dict[str, dict[str, torch.Tensor]] = {}

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._num_scheduled = scheduler_output.num_scheduled_tokens
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _model_forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """WHY into the buffer that comes in: captured graphs and compiled code read from its address. It is padded."""
        assert inputs_embeds is not None  # enable_prompt_embeds
        parts = []
        for index, internal_id in enumerate(self.input_batch.req_ids):
            start = int(self.input_batch.num_computed_tokens_cpu[index])
            parts.append(self._rows_of(internal_id).rows(start, start + self._num_scheduled[internal_id]))
        rows = torch.cat(parts)
        inputs_embeds[: len(rows)] = rows
        inputs_embeds[len(rows) :] = 0
        return super()._model_forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)  # type: ignore[misc]

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        state = self.execute_model_state
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if state is not None:
            self._complete(state.sample_hidden_states, output)
        return output

    def _complete(self: Any, hidden: torch.Tensor, output: Any) -> None:
        """Requests in the middle of their prompt have sampled nothing; the token that ends one is not completed."""
        sampled = [(index, tokens[0]) for index, tokens in enumerate(output.sampled_token_ids) if tokens]
        live = [(index, token) for index, token in sampled if token != self.model.end_token_id]
        if not live:
            return
        requests = [self._rows_of(output.req_ids[index]) for index, _ in live]
        token_ids = torch.tensor([token for _, token in live], device=hidden.device)
        generators = [request.generator for request in requests]
        codes, rows = self.model.complete(hidden[[index for index, _ in live]], token_ids, generators)
        for number, (index, _) in enumerate(live):
            requests[number].feed_back(rows[number])
            self.tapped[self._our_id(output.req_ids[index])] = {"codes": codes[number]}

    def _init_mrope_positions(self: Any, req_state: Any) -> None:
        positions = self.inputs[req_state.sampling_params.extra_args[REQUEST_ID]].positions
        if positions is None:
            super()._init_mrope_positions(req_state)  # type: ignore[misc]
        else:
            req_state.mrope_positions = positions
            req_state.mrope_position_delta = int(positions.max()) + 1 - positions.shape[1]

    def _rows_of(self: Any, internal_id: str) -> InputRows:
        return self.inputs[self._our_id(internal_id)]

    def _our_id(self: Any, internal_id: str) -> str:
        return str(self.requests[internal_id].sampling_params.extra_args[REQUEST_ID])


class TappedCPUModelRunner(HiddenTap, CPUModelRunner):
    """The V1 runner on a CPU, with hidden states out."""


class FedCPUModelRunner(RowInputs, CPUModelRunner):
    """The V1 runner on a CPU, with rows in."""


class _CPUWorker(cpu_worker.CPUWorker):
    """vLLM's CPU worker makes its runner in the middle of init_device, from a name of its module."""

    runner_class: type[CPUModelRunner]

    def init_device(self) -> None:
        original = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = self.runner_class
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = original


class TappedCPUWorker(_CPUWorker):
    runner_class = TappedCPUModelRunner


class FedCPUWorker(_CPUWorker):
    runner_class = FedCPUModelRunner
