"""Input rows and the gate that waits for them: the rows themselves, and what they assume about vLLM's inside."""

from __future__ import annotations

import inspect

import pytest
import torch

from runtime.engines.ar.inputs import InputRows
from runtime.engines.ar.program import input_rows_arguments
from tests.golden.ar_engines import import_vllm

FILLER = torch.tensor([0.5])


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)[:, None]


def values(rows: torch.Tensor) -> list[float]:
    return rows[:, 0].tolist()


def test_rows_of_the_prompt_and_after_it() -> None:
    inputs = InputRows(column(1, 2, 3), FILLER)
    assert inputs.num_prompt_rows == 3
    assert values(inputs.rows(0, 2)) == [1, 2]
    inputs.extend(column(10, 20))
    inputs.feed_back(torch.tensor([100.0]))
    inputs.feed_back(torch.tensor([200.0]))
    assert values(inputs.rows(2, 5)) == [3, 110, 220]
    assert values(inputs.rows(4, 5)) == [220], "a preempted request starts again anywhere"


def test_a_row_is_missing_until_it_comes_or_none_comes_any_more() -> None:
    inputs = InputRows(column(1), FILLER)
    assert inputs.can_follow(0)
    assert not inputs.can_follow(1)
    inputs.extend(column(10))
    assert inputs.can_follow(1)
    assert not inputs.can_follow(2)
    inputs.finish()
    assert inputs.can_follow(2)
    inputs.feed_back(torch.tensor([100.0]))
    inputs.feed_back(torch.tensor([200.0]))
    assert values(inputs.rows(1, 3)) == [110, 200.5]


def test_a_greedy_request_draws_nothing() -> None:
    inputs = InputRows(column(1), FILLER)
    inputs.seed(None)
    assert inputs.generator is None
    inputs.seed(2**63 - 1)
    assert inputs.generator is not None
    assert inputs.generator.initial_seed() == 0


def test_the_scheduler_is_as_the_gate_expects() -> None:
    import_vllm()
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from runtime.engines.ar.compat_scheduler import GatedScheduler, StageScheduler

    assert issubclass(GatedScheduler, StageScheduler)
    assert issubclass(StageScheduler, Scheduler)
    source = inspect.getsource(Scheduler.schedule)
    assert "if num_running >= self.max_num_active_reqs:" in source
    assert "assert len(self.running) <= self.max_num_running_reqs" in source
    for name in ("remove_requests", "prepend_requests"):
        assert hasattr(RequestQueue, name)
    assert isinstance(Request.num_output_tokens, property)


def test_requests_put_back_keep_their_order() -> None:
    import_vllm()
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue

    queue = FCFSRequestQueue(["a", "b", "c", "d"])
    held = ["a", "c"]
    queue.remove_requests(held)
    queue.prepend_requests(held[::-1])
    assert list(queue) == ["a", "c", "b", "d"]


def test_the_runner_is_as_the_rows_expect() -> None:
    import_vllm()
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from runtime.engines.ar.compat_runner import RowInputs

    for name in ("load_model", "execute_model", "_model_forward", "sample_tokens"):
        assert name in vars(RowInputs)
        assert hasattr(GPUModelRunner, name)
    assert list(inspect.signature(GPUModelRunner.execute_model).parameters)[:2] == ["self", "scheduler_output"]
    assert {"req_ids", "sampled_token_ids"} <= set(ModelRunnerOutput.__dataclass_fields__)
    assert "sample_hidden_states = hidden_states[logits_indices]" in inspect.getsource(GPUModelRunner.execute_model)


@pytest.mark.parametrize(("device", "worker"), [("cpu", "FedCPUWorker"), ("cuda:0", "FedGPUWorker")])
def test_workers_and_scheduler_are_found_by_name(device: str, worker: str) -> None:
    import_vllm()
    from vllm.utils.import_utils import resolve_obj_by_qualname

    arguments = input_rows_arguments((device,))
    assert resolve_obj_by_qualname(arguments["worker_cls"]).__name__ == worker
    assert resolve_obj_by_qualname(arguments["scheduler_cls"]).__name__ == "GatedScheduler"


def test_a_draw_depends_on_its_own_generator_alone() -> None:
    import_vllm()
    from runtime.programs.qwen3_omni.code_predictor import TOP_K, draw_noise, pick

    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1).tolist()
    assert pick(logits, None).tolist() == best
    assert draw_noise([None] * 4, 1, logits.device) is None

    def draw(rows: list[int], seeds: list[int | None]) -> list[int]:
        generators = [None if seed is None else torch.Generator().manual_seed(seed) for seed in seeds]
        noise = draw_noise(generators, 1, logits.device)
        assert noise is not None
        return pick(logits[rows], noise[:, 0], torch.tensor([seed is not None for seed in seeds])).tolist()

    alone = [draw([row], [row + 10])[0] for row in range(4)]
    assert draw([0, 1, 2, 3], [10, 11, 12, 13]) == alone
    assert draw([3, 0], [13, None]) == [alone[3], best[0]]
    tied = torch.zeros(2, 200)
    noise = draw_noise([torch.Generator().manual_seed(1), None], 1, logits.device)
    assert noise is not None
    assert pick(tied, noise[:, 0], torch.tensor([True, False]))[1] == tied[1].argmax(), "the same of equals as alone"
    allowed = set(logits[0].topk(TOP_K).indices.tolist())
    drawn = {draw([0], [seed])[0] for seed in range(200)}
    assert len(drawn) > 5
    assert drawn <= allowed
