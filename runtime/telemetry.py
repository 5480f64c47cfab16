"""Metrics of a deployment in a registry of its own: fed by orchestrator and supervisor, rendered by the server."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.messages import StageStats
from runtime.plan import Modality

LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60, 120)
RTF_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 5)


class Telemetry:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.accepted = Counter("omnictl_requests", "Requests accepted", ["task"], registry=registry)
        self.terminals = Counter("omnictl_terminals", "Requests ended", ["task", "kind"], registry=registry)
        self.rejected = Counter("omnictl_rejected", "Requests refused before acceptance", ["code"], registry=registry)
        self.dropped = Counter(
            "omnictl_dropped_updates", "Updates and outputs of unknown, ended or older requests", registry=registry
        )
        self.queue_depth = Gauge("omnictl_admission_queue", "Requests that wait for a slot", registry=registry)
        self.open_requests = Gauge("omnictl_open_requests", "Requests accepted and not ended", registry=registry)
        self.first_output = Histogram(
            "omnictl_first_output_seconds",
            "Acceptance to the first output of a modality (text: TTFT, audio: first audio)",
            ["task", "modality"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.duration = Histogram(
            "omnictl_request_seconds",
            "Acceptance to the end",
            ["task"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.real_time_factor = Histogram(
            "omnictl_audio_real_time_factor",
            "Request time over seconds of audio made",
            ["task"],
            buckets=RTF_BUCKETS,
            registry=registry,
        )
        self.restarts = Counter("omnictl_restarts", "Process restarts", ["process"], registry=registry)
        self.process_memory = Gauge("omnictl_process_resident_bytes", "Resident memory", ["process"], registry=registry)
        self.process_payloads = Gauge(
            "omnictl_process_payload_bytes", "Payloads that wait for their consumers", ["process"], registry=registry
        )
        self.stage_queued = Gauge("omnictl_stage_queued", "Requests that wait in a stage", _STAGE, registry=registry)
        self.stage_running = Gauge("omnictl_stage_running", "Requests that run in a stage", _STAGE, registry=registry)
        self.stage_kv_blocks = Gauge(
            "omnictl_stage_kv_blocks_used", "Blocks of the KV cache that belong to requests", _STAGE, registry=registry
        )
        self._stages = StageCounters()
        registry.register(self._stages)

    def observe_first(self, task: str, modality: Modality, seconds: float) -> None:
        self.first_output.labels(task, modality).observe(seconds)

    def stage(self, stats: StageStats, generation: int) -> None:
        """Numbers of one replica, as of its latest beat."""
        self.stage_queued.labels(stats.stage, stats.index).set(stats.queued)
        self.stage_running.labels(stats.stage, stats.index).set(stats.running)
        self.stage_kv_blocks.labels(stats.stage, stats.index).set(stats.kv_blocks_used)
        self._stages.update(stats, generation)

    def idle(self, stage: str, index: int) -> None:
        """A replica is gone: nothing waits or runs in it."""
        self.stage_queued.labels(stage, index).set(0)
        self.stage_running.labels(stage, index).set(0)
        self.stage_kv_blocks.labels(stage, index).set(0)


_STAGE = ["stage", "replica"]


class StageCounters(Collector):
    """Counters kept by the replicas themselves. A restarted replica starts at 0: its predecessors' are added."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, int], tuple[int, dict[tuple[str, str], float]]] = {}
        self._finished: dict[tuple[str, int], dict[tuple[str, str], float]] = {}

    def update(self, stats: StageStats, generation: int) -> None:
        key = (stats.stage, stats.index)
        values: dict[tuple[str, str], float] = {
            ("steps", ""): stats.steps,
            ("submitted", ""): stats.submitted,
            ("dropped_pieces", ""): stats.dropped_pieces,
        }
        values |= {("edge_bytes", edge): size for edge, size in stats.edge_bytes.items()}
        values |= {("events", name): value for name, value in stats.counters.items()}
        before = self._latest.get(key)
        if before is not None and before[0] != generation:
            finished = self._finished.setdefault(key, {})
            for name, value in before[1].items():
                finished[name] = finished.get(name, 0.0) + value
        self._latest[key] = (generation, values)

    def collect(self) -> Iterable[Metric]:
        families = {
            "steps": CounterMetricFamily("omnictl_stage_steps", "Engine steps", labels=_STAGE),
            "submitted": CounterMetricFamily("omnictl_stage_requests", "Requests that reached a stage", labels=_STAGE),
            "dropped_pieces": CounterMetricFamily(
                "omnictl_stage_dropped_pieces", "Pieces of unknown, ended or older requests", labels=_STAGE
            ),
            "edge_bytes": CounterMetricFamily("omnictl_edge_bytes", "Bytes sent on an edge", labels=[*_STAGE, "edge"]),
            "events": CounterMetricFamily("omnictl_stage_events", "The engine's own counts", labels=[*_STAGE, "event"]),
        }
        for (stage, index), (_, values) in self._latest.items():
            finished = self._finished.get((stage, index), {})
            for (family, label), value in values.items():
                labels = [stage, str(index)] + ([label] if label else [])
                families[family].add_metric(labels, value + finished.get((family, label), 0.0))
        return families.values()
