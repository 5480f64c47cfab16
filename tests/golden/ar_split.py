"""Both halves of a split stage in one process, joined by the inproc connector, for tests of the `ar` engine."""

from __future__ import annotations

from typing import Any

from runtime.connectors.inproc import InprocConnector
from runtime.engines.ar.engine import ArEngine
from runtime.engines.base import End, StageWork
from runtime.payload import Payload
from runtime.plan import REQUEST_INPUT, PayloadKind

EDGE = "prefill->decode"


class SplitEngine:
    """Looks like one engine. What its first half gives goes through a connector, as between two stage loops.

    `held`: requests whose payloads stay on the edge. `ends`: what the first half ended with.
    """

    def __init__(self, producer: ArEngine, consumer: ArEngine) -> None:
        self.producer, self.consumer = producer, consumer
        self.connector = InprocConnector()
        self.held: set[str] = set()
        self.ends: dict[str, End] = {}
        self._waiting: list[Payload] = []

    @property
    def program(self) -> Any:
        return self.consumer.program

    def submit(self, work: StageWork) -> None:
        wants = frozenset({str(PayloadKind.KV_BLOCKS)})
        self.producer.submit(StageWork(work.request_id, work.epoch, work.params, work.inputs, wants))
        self.consumer.submit(StageWork(work.request_id, work.epoch, work.params, frozenset({EDGE}), work.wants))

    def feed(self, request_id: str, payload: Payload) -> None:
        assert payload.edge == REQUEST_INPUT
        self.producer.feed(request_id, payload)

    def abort(self, request_id: str) -> None:
        self.producer.abort(request_id)
        self.consumer.abort(request_id)
        self._waiting = [payload for payload in self._waiting if payload.request_id != request_id]

    def next_step_s(self) -> float | None:
        idle = self.producer.next_step_s() is None and self.consumer.next_step_s() is None
        return None if idle and not self._flowing() else 0.0

    def step(self) -> list[Any]:
        outputs = []
        if self.producer.next_step_s() is not None:
            outputs = self._posted(self.producer.step())
        for payload in self._flowing():
            self._waiting.remove(payload)
            ref = self.connector.put(payload)
            self.consumer.feed(payload.request_id, self.connector.get(ref))
            self.connector.reclaim(ref)
        if self.consumer.next_step_s() is not None:
            outputs += self.consumer.step()
        return outputs

    def _flowing(self) -> list[Payload]:
        return [payload for payload in self._waiting if payload.request_id not in self.held]

    def _posted(self, outputs: list[Any]) -> list[Any]:
        """Puts payloads on the edge; gives back the errors, which end a request everywhere."""
        failed = []
        for output in outputs:
            if output.payload is not None:
                output.payload.edge = EDGE
                self._waiting.append(output.payload)
            if output.end is not None and output.end.error is not None:
                self.abort(output.request_id)
                failed.append(output)
            elif output.end is not None:
                self.ends[output.request_id] = output.end
                self._waiting.append(Payload(PayloadKind.KV_BLOCKS, output.request_id, edge=EDGE, last=True))
        return failed

    def stats(self) -> dict[str, Any]:
        return {"producer": self.producer.stats(), "consumer": self.consumer.stats()}
