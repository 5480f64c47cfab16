"""Schedulers of vLLM that count, and hold back requests whose output has no room or whose next input row is missing.

tests/golden/test_ar_gate.py fails when vLLM changes what is used here. Made by vLLM from EngineArgs.scheduler_cls.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from runtime.engines.ar.inputs import InputRows

REQUEST_ID, WANTS_ROWS = "request_id", "wants_rows"
"""What a request's sampling parameters carry for us in `extra_args`; vLLM knows requests by ids of its own."""


class StageScheduler(Scheduler):
    """vLLM's scheduler that also counts what vLLM itself tells only through its metrics, and that does not see, in a
    step, the requests that are to wait. They keep their place and cache.
    """

    held: frozenset[str] = frozenset()
    """Requests whose output has no room. Written by the engine."""
    running: list[Any]
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_preemptions = 0
        self.num_held = 0
        """Requests held back, summed over steps."""
        self.num_computed_tokens = 0
        """Tokens that went through the model."""
        self.began_s: dict[str, float] = {}
        """Request id -> its first step; the engine takes them."""
        self._starved: frozenset[str] | None = None
        """Requests that the last step saw and had no memory for, as hidden ones keep it; None: it did something."""

    def can_step(self) -> bool:
        """Also when a request ended and the model runner has not been told yet; a step tells it.

        Not when the same requests would find no memory again: it comes with an end, or when others may go on.
        """
        if self.has_finished_requests():
            return True
        running, waiting = self._closed()
        if self.get_num_unfinished_requests() <= len(running) + len(waiting):
            return False
        return self._starved is None or self._starved != self._open_ids()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """WHY the limit: vLLM admits while it sees fewer running requests than it has slots; those that we hide have
        slots too, and admitting into them breaks it.
        """
        held_running, held_waiting = self._closed()
        limit, num_preemptions = self.max_num_active_reqs, self.num_preemptions
        open_ids = self._open_ids()
        self.num_held += len(held_running) + len(held_waiting)
        self.running = [request for request in self.running if request not in held_running]
        self.waiting.remove_requests(held_waiting)
        self.max_num_active_reqs = max(0, limit - len(held_running))
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_num_active_reqs = limit
            self.running += held_running
            self.waiting.prepend_requests(held_waiting[::-1])
        # with a connector a step without tokens may still move keys and values
        nothing = not output.total_num_scheduled_tokens and num_preemptions == self.num_preemptions
        self._starved = open_ids if nothing and self.connector is None else None
        self.num_computed_tokens += output.total_num_scheduled_tokens
        for request in output.scheduled_new_reqs:
            self.began_s[request.sampling_params.extra_args[REQUEST_ID]] = time.monotonic()
        return output

    def _closed(self) -> tuple[list[Any], list[Any]]:
        """(running, waiting) requests that this step does not see."""
        running = [request for request in self.running if not self._is_open(request)]
        return running, [request for request in self.waiting if not self._is_open(request)]

    def _open_ids(self) -> frozenset[str]:
        """By vLLM's ids."""
        return frozenset(r.request_id for r in (*self.running, *self.waiting) if self._is_open(r))

    def _is_open(self, request: Any) -> bool:
        return request.sampling_params.extra_args[REQUEST_ID] not in self.held

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.num_preemptions += 1
        super()._preempt_request(*args, **kwargs)


class GatedScheduler(StageScheduler):
    """Holds back as well the requests whose next input row has not come."""

    inputs: Mapping[str, InputRows] = {}
    """Request id -> its rows. Shared with the model runner, written by the engine."""

    def _is_open(self, request: Any) -> bool:
        rows = self.inputs[request.sampling_params.extra_args[REQUEST_ID]]
        return super()._is_open(request) and rows.can_follow(request.num_output_tokens)
