"""Memory of a plan, device by device, against what the hardware has free. Pure; works on plans alone, so the check
of a new plan and the table of an old one are the same sums.

Devices are `cpu`, `cuda:N` and `shm` (a part of the host's memory with a size of its own).
"""

from __future__ import annotations

from dataclasses import dataclass

from omnictl.hardware import Hardware
from omnictl.units import MIB, format_bytes
from runtime.plan import ConnectorKind, Plan

CPU = "cpu"
SHM = "shm"
SERVER_RESERVE_BYTES = 250 * MIB
"""The deployment's own process: interpreter, HTTP server, orchestrator."""
NUM_USES_TOLD = 5
"""How many of the greatest uses of a device an error names."""


@dataclass(frozen=True, slots=True)
class Use:
    device: str
    owner: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """What a plan takes of one device."""

    device: str
    total_bytes: int
    free_bytes: int
    uses: tuple[Use, ...]

    @property
    def needed_bytes(self) -> int:
        return sum(use.size_bytes for use in self.uses)

    @property
    def shortfall_bytes(self) -> int:
        return max(0, self.needed_bytes - self.free_bytes)

    def describe_shortfall(self) -> str:
        """The sums in words, the greatest uses first."""
        taken_bytes = self.total_bytes - self.free_bytes
        others = (
            f" (of {format_bytes(self.total_bytes)}, {format_bytes(taken_bytes)} in use)" if taken_bytes > 0 else ""
        )
        return (
            f"{self.device}: {format_bytes(self.needed_bytes)} needed, {format_bytes(self.free_bytes)} free{others}: "
            f"{format_bytes(self.shortfall_bytes)} short ({', '.join(self._greatest_uses())})"
        )

    def _greatest_uses(self) -> list[str]:
        """Uses of one owner summed; the small ones as one."""
        sums: dict[str, int] = {}
        for use in self.uses:
            sums[use.owner] = sums.get(use.owner, 0) + use.size_bytes
        ordered = sorted(sums.items(), key=lambda item: -item[1])
        told, rest = ordered[:NUM_USES_TOLD], ordered[NUM_USES_TOLD:]
        parts = [f"{owner} {format_bytes(size_bytes)}" for owner, size_bytes in told]
        return [*parts, f"{len(rest)} others {format_bytes(sum(size for _, size in rest))}"] if rest else parts


def device_budgets(plan: Plan, hardware: Hardware) -> list[DeviceBudget]:
    """Every device that the plan takes memory of."""
    free = {CPU: (hardware.cpu.total_bytes, hardware.cpu.free_bytes), SHM: (hardware.shm_free_bytes,) * 2}
    free |= {gpu.device: (gpu.total_bytes, gpu.free_bytes) for gpu in hardware.gpus}
    uses = memory_uses(plan)
    return [
        DeviceBudget(device, *free[device], own)
        for device in free
        if (own := tuple(use for use in uses if use.device == device))
    ]


def memory_uses(plan: Plan) -> list[Use]:
    """A process's reserve counts on the host and on each of its GPUs, its stages on its devices only."""
    uses = [Use(CPU, "server", SERVER_RESERVE_BYTES)]
    for process in plan.processes:
        for replica in process.replicas:
            stage = plan.stage(replica.stage)
            copies = f" x {stage.replicas}" if stage.replicas > 1 else ""
            owner = f"stage {stage.name}{copies}"
            uses += [Use(device, owner, stage.memory.total_bytes) for device in process.devices]
        touched = dict.fromkeys((CPU, *process.devices))
        uses += [Use(device, f"reserve of {process.name}", process.reserve_bytes) for device in touched]
    for edge in plan.edges:
        pairs = plan.stage(edge.source).replicas * plan.stage(edge.target).replicas
        devices = (CPU, SHM) if edge.connector is ConnectorKind.SHM else (CPU,)
        uses += [Use(device, f"edge {edge.name}", edge.capacity_bytes * pairs) for device in devices]
    return [use for use in uses if use.size_bytes]
