"""The tap for hidden states: its store, and every assumption about vLLM's model runners that it makes."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.engines.ar.hidden import SlotStore
from runtime.engines.ar.program import Generated, Prompt, hidden_states_arguments
from runtime.payload import Payload
from tests.golden.ar_engines import Driver, TokenProgram, import_vllm, make_engine
from tests.golden.tiny_llama import save_random

BLOCK = 4


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[:, None]


def taken(store: SlotStore, request_id: str, blocks: list[int], end: int) -> tuple[int, list[float]] | None:
    found = store.take(request_id, torch.tensor(blocks, dtype=torch.int32), end)
    return None if found is None else (found[0], found[1][:, 0].tolist())


def test_rows_follow_the_block_table() -> None:
    store = SlotStore(torch.zeros(8, BLOCK, 1))
    store.put(torch.tensor([20, 21, 22, 23, 4, 5]), rows(0, 1, 2, 3, 4, 5))
    assert taken(store, "r", [5, 1, 0], 6) == (0, [0, 1, 2, 3, 4, 5])
    store.put(torch.tensor([6]), rows(6))
    assert taken(store, "r", [5, 1, 0], 7) == (6, [6])
    assert taken(store, "r", [5, 1, 0], 7) is None


def test_a_row_is_taken_once_wherever_it_was_computed_again() -> None:
    store = SlotStore(torch.zeros(8, BLOCK, 1))
    store.put(torch.arange(4), rows(0, 1, 2, 3))
    assert taken(store, "r", [0], 4) == (0, [0, 1, 2, 3])
    store.put(torch.arange(8, 13), rows(0, 1, 2, 3, 4))
    assert taken(store, "r", [2, 3], 3) is None
    assert taken(store, "r", [2, 3], 5) == (4, [4])


def test_a_shared_block_serves_whoever_has_it_in_the_table() -> None:
    store = SlotStore(torch.zeros(8, BLOCK, 1))
    store.put(torch.arange(4), rows(0, 1, 2, 3))
    assert taken(store, "first", [0], 4) == taken(store, "second", [0], 4)


def test_copied_blocks_and_forgotten_requests() -> None:
    store = SlotStore(torch.zeros(8, BLOCK, 1))
    store.copy_blocks([(0, 1)])
    store.put(torch.arange(4), rows(0, 1, 2, 3))
    store.copy_blocks([(0, 3)])
    assert taken(store, "r", [3], 2) == (0, [0, 1])
    assert store.num_requests == 1
    store.forget("r")
    store.forget("r")
    assert store.num_requests == 0
    assert taken(store, "r", [3], 2) == (0, [0, 1])


@pytest.fixture
def runners() -> tuple[type, type]:
    import_vllm()
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return CPUModelRunner, GPUModelRunner


def test_both_runners_call_what_the_tap_overrides(runners: tuple[type, type]) -> None:
    from runtime.engines.ar.compat_runner import HiddenTap

    _, gpu = runners
    for name in ("load_model", "initialize_kv_cache", "_model_forward", "sample_tokens", "_update_states"):
        assert name in vars(HiddenTap)
        assert all(hasattr(runner, name) for runner in runners)
    parameters = list(inspect.signature(gpu._model_forward).parameters)
    assert parameters[:5] == ["self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds"]
    source = inspect.getsource(gpu.execute_model)
    for call in ("self._update_states(scheduler_output)", "self._model_forward(", "self.execute_model_state = "):
        assert call in source
    assert "hidden_states, aux_hidden_states = model_output" in source
    assert inspect.getsource(gpu).count("self._model_forward(") == 1, "called for something that is not a step"


def test_what_passes_from_the_forward_to_the_sampling() -> None:
    import_vllm()
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState

    assert {"scheduler_output", "sample_hidden_states"} <= set(ExecuteModelState._fields)
    expected = {"finished_req_ids", "kv_cache_block_copies", "num_scheduled_tokens", "total_num_scheduled_tokens"}
    assert expected <= set(SchedulerOutput.__dataclass_fields__)


def test_workers_make_their_runner_where_we_put_ours() -> None:
    import_vllm()
    from vllm.v1.worker import cpu_worker

    from runtime.engines.ar.compat_runner import HiddenTap, TappedCPUModelRunner, TappedCPUWorker

    assert "self.model_runner = CPUModelRunner(" in inspect.getsource(cpu_worker.CPUWorker.init_device)
    assert issubclass(TappedCPUWorker, cpu_worker.CPUWorker)
    assert TappedCPUModelRunner.__mro__[1] is HiddenTap


def test_the_seam_for_gpus() -> None:
    """Without a GPU only that the names are there, and that our worker builds the tapped runner."""
    import_vllm()
    from runtime.engines.ar import compat_gpu
    from runtime.engines.ar.compat_runner import HiddenTap

    worker = compat_gpu.TappedGPUWorker
    assert "_make_model_runner" in vars(worker.__mro__[1])
    assert "self.model_runner: GPUModelRunner = self._make_model_runner()" in inspect.getsource(worker.__mro__[1])
    assert issubclass(compat_gpu.TappedGPUModelRunner, HiddenTap)


class RowsProgram(TokenProgram):
    """Keeps the rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    def prompt(self, state: dict[str, Any], tokenizer: Any) -> Prompt:
        return dataclasses.replace(super().prompt(state, tokenizer), wants_rows=True)

    def payloads(self, state: dict[str, Any], generated: Generated) -> list[Payload]:
        self.rows.append(dict(generated.tensors))
        return super().payloads(state, generated)


def test_without_a_layer_it_is_what_the_model_makes_of_all_of_them(tmp_path: Path) -> None:
    model, program = save_random(tmp_path), RowsProgram()
    engine = make_engine(tmp_path, program, **hidden_states_arguments(None, ("cpu",)))
    ids = Driver(engine).answer(range(40), max_tokens=4).ids
    found = {name: torch.cat([rows[name] for rows in program.rows]) for name in program.rows[0]}
    engine.close()
    seen = torch.tensor([[*range(40), *ids[:-1]]])
    with torch.inference_mode():
        expected = model(seen, output_hidden_states=True).hidden_states
    assert found["token_ids"].tolist() == seen[0].tolist()
    torch.testing.assert_close(found["embeddings"], expected[0][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(found["hidden"], expected[-1][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("device", "worker"), [("cpu", "TappedCPUWorker"), ("cuda:0", "TappedGPUWorker")])
def test_workers_are_found_by_name(device: str, worker: str) -> None:
    import_vllm()
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert resolve_obj_by_qualname(hidden_states_arguments(2, (device,))["worker_cls"]).__name__ == worker
