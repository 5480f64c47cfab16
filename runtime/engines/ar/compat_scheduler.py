"""Schedulers of vLLM that count, and that hold back requests whose next input row is missing.

tests/golden/test_ar_gate.py fails when vLLM changes what is used here. Made by vLLM from EngineArgs.scheduler_cls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from runtime.engines.ar.inputs import InputRows

REQUEST_ID, WANTS_ROWS = "request_id", "wants_rows"
"""What a request's sampling parameters carry for us in `extra_args`; vLLM knows requests by ids of its own."""


class StageScheduler(Scheduler):
    """vLLM's scheduler that also counts preemptions, which vLLM itself tells only through its metrics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_preemptions = 0

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.num_preemptions += 1
        super()._preempt_request(*args, **kwargs)

    def can_step(self) -> bool:
        """Also when a request ended and the model runner has not been told yet; a step tells it."""
        return bool(self.has_requests())


class GatedScheduler(StageScheduler):
    """Does not see, in a step, the requests whose next input row has not come. They keep their place and cache."""

    inputs: Mapping[str, InputRows] = {}
    """Request id -> its rows. Shared with the model runner, written by the engine."""
    running: list[Any]
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_held = 0
        """Requests held back, summed over steps."""

    def can_step(self) -> bool:
        if self.has_finished_requests():
            return True
        return any(self._is_open(request) for queue in (self.running, self.waiting) for request in queue)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """WHY the limit: vLLM admits while it sees fewer running requests than it has slots; those that we hide have
        slots too, and admitting into them breaks it.
        """
        held_running = [request for request in self.running if not self._is_open(request)]
        held_waiting = [request for request in self.waiting if not self._is_open(request)]
        limit = self.max_num_active_reqs
        self.num_held += len(held_running) + len(held_waiting)
        self.running = [request for request in self.running if request not in held_running]
        self.waiting.remove_requests(held_waiting)
        self.max_num_active_reqs = max(0, limit - len(held_running))
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_active_reqs = limit
            self.running += held_running
            self.waiting.prepend_requests(held_waiting[::-1])

    def _is_open(self, request: Any) -> bool:
        rows = self.inputs[request.sampling_params.extra_args[REQUEST_ID]]
        return rows.can_follow(request.num_output_tokens)
