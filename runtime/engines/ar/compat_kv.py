"""vLLM's side of a split stage: a KV connector that takes blocks out of one engine's cache and puts them into another.

`BlockConnector` implements vLLM's connector interface, once for the scheduler and once for the worker of an engine. It
knows blocks and requests; how the bytes travel is the edge's. tests/golden/test_ar_split.py fails when vLLM changes
what is used here. Made by vLLM from `connector_arguments`, driven by compat.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from runtime.engines.ar.compat_scheduler import REQUEST_ID
from runtime.engines.ar.split import Blocks, Prefix, Role
from runtime.errors import ConfigError
from runtime.payload import Tensor

ROWS = "rows"
"""Name of what a model runner keeps beside the KV cache, among the layers."""

_turn = threading.RLock()


class BlockStore(Protocol):
    """A cache in blocks that is none of vLLM's, such as hidden.SlotStore."""

    def read_blocks(self, blocks: Sequence[int]) -> torch.Tensor: ...

    def write_blocks(self, blocks: Sequence[int], values: torch.Tensor) -> None: ...


def connector_arguments(role: Role) -> dict[str, Any]:
    """Engine arguments of one half of a split stage."""
    config = KVTransferConfig(
        kv_connector=BlockConnector.__name__, kv_connector_module_path=__name__, kv_role=f"kv_{role}"
    )
    return {"kv_transfer_config": config}


@contextmanager
def engine_turn(connector: Any = None) -> Iterator[None]:
    """One engine of this process at a time, with its own connector.

    WHY: vLLM keeps the context of a forward pass and the worker's connector in globals of its modules.
    SCOPE: vLLM 0.32. REMOVE WHEN: an engine holds them itself.
    """
    with _turn:
        outer = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = connector
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = outer


def installed_connector() -> Any:
    """The worker's connector of the engine whose turn it is; None when it has none."""
    return kv_transfer_state._KV_CONNECTOR_AGENT


@dataclass(frozen=True, slots=True)
class _Load:
    """Blocks of `prefix` from `first` on belong into the request's blocks of the same numbers."""

    prefix: Prefix
    first: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Save:
    request_id: str
    first: int
    block_ids: Sequence[int]


@dataclass
class _Transfers(KVConnectorMetadata):
    """What one step loads before its forward pass, and saves after it."""

    loads: list[_Load] = field(default_factory=list)
    saves: list[_Save] = field(default_factory=list)


class BlockConnector(KVConnectorBase_V1):
    """Loads and saves within the step, so nothing of it outlives a request's blocks.

    A request loads once: when it is preempted later, it computes its prompt again.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ConfigError(f"a model with {len(groups)} kinds of KV cache cannot be split; expected 1 kind")
        self._block_size: int = groups[0].kv_cache_spec.block_size
        # the scheduler's
        self.prefixes: dict[str, Prefix] = {}
        """Our request id -> what has come for a request that vLLM has not admitted yet."""
        self.num_loaded_tokens = 0
        self._requests: dict[str, Any] = {}
        self._num_saved: dict[str, int] = {}
        """vLLM's request id -> blocks that were saved."""
        self._loads: list[_Load] = []
        # the worker's
        self.saved: list[tuple[str, Blocks]] = []
        """What the last step saved: our request id, blocks."""
        self.rows: BlockStore | None = None
        self._caches: dict[str, torch.Tensor] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what a step computed is saved in it, before anything can preempt the request."""
        return False

    # ---- the scheduler's side ------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All of the prompt but its last token, which the engine computes to sample from. Without side effects."""
        if _our_id(request) not in self.prefixes:
            return 0, False
        return max(0, request.num_prompt_tokens - 1 - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        prefix = self.prefixes.pop(_our_id(request), None)
        if prefix is None or not num_external_tokens:
            return
        first_token = request.num_prompt_tokens - 1 - num_external_tokens
        (block_ids,) = blocks.get_block_ids()
        self._loads.append(_Load(prefix, first_token // self._block_size, block_ids))
        self.num_loaded_tokens += num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> _Transfers:
        loads, self._loads = self._loads, []
        if not self._kv_transfer_config.is_kv_producer:
            return _Transfers(loads)
        cached = scheduler_output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        scheduled = scheduler_output.num_scheduled_tokens
        saves = [self._save(name, start + scheduled[name]) for name, start in starts.items()]
        return _Transfers(loads, [save for save in saves if save is not None])

    def _save(self, internal_id: str, end: int) -> _Save | None:
        """The blocks that are complete when the step has computed the tokens up to `end`, and were not before."""
        request, first = self._requests[internal_id], self._num_saved.get(internal_id, 0)
        num_needed = request.num_prompt_tokens - 1
        last = -(-num_needed // self._block_size) if end >= num_needed else end // self._block_size
        if last <= first:
            return None
        self._num_saved[internal_id] = last
        (block_ids,) = self._kv_cache_manager.get_block_ids(internal_id)
        return _Save(_our_id(request), first, block_ids[first:last])

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Also called for an aborted one. Nothing is under way that needs its blocks."""
        self.prefixes.pop(_our_id(request), None)
        self._requests.pop(request.request_id, None)
        self._num_saved.pop(request.request_id, None)
        return False, None

    # ---- the worker's side ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        num_blocks = self._kv_cache_config.num_blocks
        for name, cache in kv_caches.items():
            if cache.shape[0] != num_blocks:
                raise ConfigError(
                    f"the KV cache of layer {name} has {cache.shape[0]} blocks and its scheduler {num_blocks}; "
                    "expected the same number",
                    hint="change the stage's block_size",
                )
        self._caches = dict(kv_caches)

    def layout(self) -> dict[str, Any]:
        """What must be equal in both halves."""
        cache = next(iter(self._caches.values()))
        return {
            "num_layers": len(self._caches),
            "block_size": self._block_size,
            "block_shape": list(cache.shape[1:]),
            "dtype": str(cache.dtype).removeprefix("torch."),
            "has_rows": self.rows is not None,
        }

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._connector_metadata.loads:
            for piece in load.prefix.pieces:
                skipped = max(0, load.first - piece.first)
                block_ids = load.block_ids[piece.first + skipped : piece.first + piece.count]
                if block_ids:
                    for name, values in piece.layers.items():
                        self._write(name, block_ids, values[skipped:])

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is there before the forward pass starts."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are saved together, after the forward pass."""

    def wait_for_save(self) -> None:
        for save in self._connector_metadata.saves:
            layers = {name: _bytes_of(cache[list(save.block_ids)]) for name, cache in self._caches.items()}
            if self.rows is not None:
                layers[ROWS] = _bytes_of(self.rows.read_blocks(save.block_ids))
            self.saved.append((save.request_id, Blocks(save.first, layers)))

    def take_saved(self) -> list[tuple[str, Blocks]]:
        saved, self.saved = self.saved, []
        return saved

    def _write(self, name: str, block_ids: Sequence[int], values: Tensor) -> None:
        # memory that was handed over by reference is read-only, which torch has no word for
        raw = torch.from_numpy(values if values.flags.writeable else values.copy())
        if name == ROWS:
            assert self.rows is not None
            self.rows.write_blocks(block_ids, raw)
            return
        cache = self._caches[name]
        cache[list(block_ids)] = raw.view(cache.dtype).view(-1, *cache.shape[1:]).to(cache.device)


def _bytes_of(blocks: torch.Tensor) -> Tensor:
    """uint8 [blocks, bytes of a block], on the host."""
    found: Tensor = blocks.contiguous().view(torch.uint8).flatten(1).cpu().numpy()
    return found


def _our_id(request: Any) -> str:
    return str(request.sampling_params.extra_args[REQUEST_ID])
