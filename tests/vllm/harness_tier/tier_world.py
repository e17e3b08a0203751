"""vLLM's real `TieringOffloadingManager` with the tier below it, and a stand-in for the GPU worker that writes and reads rows of
the CPU tier's real shared memory."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from forebay.vllm.register import register

#: Bytes of a block of the CPU tier: no power of two.
ROW = 20 * 4096
#: Nothing here may take longer.
PATIENCE_S = 60.0

register()


def key(number: int, group: int = 0) -> OffloadKey:
    """A block's key as vLLM makes them."""
    return make_offload_key(hashlib.sha256(b"block %d" % number).digest(), group)


def keys(*numbers: int) -> list[OffloadKey]:
    """Keys of group 0."""
    return [key(n) for n in numbers]


def content(key: OffloadKey, length: int) -> np.ndarray:
    """The bytes that belong to a key, and to no other."""
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def config(extra: dict[str, Any], row: int = ROW, **changed: Any) -> OffloadingConfig:
    """What vLLM would make of a server's configuration."""
    parallel = dict(
        rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0, data_parallel_size=1,
        data_parallel_rank_local=None, is_parallelism_agnostic=True,
    )  # fmt: skip
    fields: dict[str, Any] = dict(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layers.0", "layers.1"), group_id=0),),
        worker_kv_bytes_per_block=row,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id=f"forebay-test-{uuid.uuid4()}",
        model=OffloadingModelConfig(name=changed.pop("model", "tiny"), dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(**parallel),
    )
    return OffloadingConfig(**(fields | changed))


class World:
    """One server's CPU tier of `rows` blocks above a cache directory. Close it, and make another one, to restart."""

    def __init__(self, cache_dir: Path, rows: int = 6, row: int = ROW, tier: dict[str, Any] | None = None, **changed: Any):
        section = {
            "type": "forebay",
            "backend": "gds",
            "gds_config": {"cache_dir": str(cache_dir)},
            "capacity": "256MiB",
            "min_free": 0,
            "fingerprint": "test",
        }
        extra = {"cpu_bytes_to_use": rows * row, "secondary_tiers": [section | (tier or {})]}
        self.spec = TieringOffloadingSpec(config(extra, row, **changed))
        self.manager: Any = self.spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0]
        view = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        self.row = view.strides[0]
        self._view: np.ndarray | None = view.view(np.uint8)
        self._requests = 0

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """As vLLM shuts down."""
        self._view = None
        self.manager.shutdown()

    @property
    def view(self) -> np.ndarray:
        """The CPU tier's rows."""
        assert self._view is not None
        return self._view

    def request(self) -> ReqContext:
        """A new request."""
        self._requests += 1
        context = ReqContext(req_id=f"request {self._requests}")
        self.manager.on_new_request(context)
        return context

    def reset(self) -> None:
        """As vLLM empties its caches, with no copy between GPU and CPU tier under way."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):
            # vLLM 0.33 promotes nothing until its workers have said so.
            self.manager.on_reset_flushed()

    def step(self) -> None:
        """The end of a scheduler step, and the model's run after it."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        time.sleep(0.0005)

    def settle(self) -> None:
        """Steps until nothing is under way, as an idle engine does."""
        until = time.monotonic() + PATIENCE_S
        while self.manager.has_pending_work():
            assert time.monotonic() < until, f"jobs {list(self.manager._jobs)} do not end"
            self.step()

    def store(self, wanted: Sequence[OffloadKey], wrong: bool = False, settle: bool = True) -> list[OffloadKey]:
        """A request that computes blocks and offloads them; the keys that vLLM wanted."""
        context = self.request()
        prepared = self.manager.prepare_store(wanted, context)
        stored: list[OffloadKey] = []
        if prepared is not None and prepared.keys_to_store:
            stored = prepared.keys_to_store
            for block, row in zip(stored, prepared.store_spec.block_ids):
                self.view[row] = content(block, self.row) ^ (0xFF if wrong else 0)
            self.manager.complete_store(stored, context)
        self.manager.on_request_finished(context)
        self.step()
        if settle:
            self.settle()
        return stored

    def load(self, wanted: Sequence[OffloadKey]) -> int:
        """A request that loads the longest stored prefix of `wanted`, and compares every byte. Blocks that it loaded."""
        context = self.request()
        until = time.monotonic() + PATIENCE_S
        while (hits := self._prefix(wanted, context)) is None:
            assert time.monotonic() < until, "a lookup does not come to an end"
            self.step()
        if hits:
            loaded = list(wanted[:hits])
            rows = self.manager.prepare_load(loaded, context).block_ids
            for block, row in zip(loaded, rows):
                assert (self.view[row] == content(block, self.row)).all(), f"wrong bytes for {block.hex()}"
            self.manager.complete_load(loaded, context)
        self.manager.on_request_finished(context)
        self.step()
        self.settle()
        return hits

    def _prefix(self, wanted: Sequence[OffloadKey], context: ReqContext) -> int | None:
        """As vLLM's `_maximal_prefix_lookup`."""
        hits, deferred = 0, False
        for block in wanted:
            match self.manager.lookup(block, context):
                case LookupResult.HIT:
                    hits += 1
                case LookupResult.HIT_PENDING:
                    hits += 1
                    deferred = True
                case LookupResult.RETRY:
                    deferred = True
                case LookupResult.MISS:
                    break
        return None if deferred else hits
