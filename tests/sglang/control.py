"""SGLang's real controller with its threads, over real pools and Forebay. What moves pages between device and host memory is left out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import world
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import PoolEntry
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

PATIENCE_S = 60


def entry(name: PoolName, pool: Any) -> PoolEntry:
    return PoolEntry(name=name, host_pool=pool, device_pool=None, layer_mapper=lambda layer: layer, is_primary_index_anchor=name == "kv")


@contextmanager
def controller(
    cache: Path,
    kv: Any,
    *,
    is_mla: bool = False,
    group: Any = None,
    rank: int = 0,
    size: int = 1,
    more: dict[str, Any] | None = None,
    **beside: Any,
) -> Iterator[Any]:
    """A controller with its storage threads running; `beside` are pools by name."""
    world.server_args()
    common = {"size": world.TOKENS, "page_size": world.PAGE, "dtype": torch.bfloat16, "layer_num": world.LAYERS, "device": "cpu"}
    if is_mla:
        device: Any = MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=16, enable_memory_saver=False, **common)
    else:
        device = MHATokenToKVPool(head_num=world.HEADS, head_dim=world.DIM, enable_memory_saver=False, **common)
    allocator = TokenToKVPoolAllocator(world.TOKENS, torch.bfloat16, "cpu", device, False)
    pools = HostPoolGroup([entry(PoolName.KV, kv), *(entry(PoolName(name), pool) for name, pool in beside.items())])
    given = world.extra(cache, **(more or {}))
    with (
        get_parallel().override(
            tp_rank=rank, tp_size=size, pp_rank=0, pp_size=1, attn_tp_rank=rank, attn_tp_size=size, moe_tp_size=size
        ),
        mock.patch.object(cache_controller, "L2TransferEngine"),
        mock.patch.object(cache_controller, "LayerDoneCounter"),
    ):
        made = HybridCacheController(
            allocator,
            pools,
            world.PAGE,
            group,
            threading.Event(),
            io_backend="direct",
            storage_backend="dynamic",
            prefetch_threshold=1,
            model_name="served-name",
            storage_backend_extra_config=given,
        )
        try:
            yield made
        finally:
            made.detach_storage_backend()


def hashes(tokens: list[int]) -> list[str]:
    """The names that SGLang gives to a prompt's pages."""
    return get_storage_hash_str(tokens, None, page_size=world.PAGE)


def taken(queue: Any) -> Any:
    """What a thread of the controller has answered."""
    return queue.get(timeout=PATIENCE_S)


def back_up(control: Any, tokens: list[int], indices: torch.Tensor, extra_pools: Any = None) -> int:
    """Stores a prompt's pages as the tree does; how many tokens of the KV were stored."""
    control.write_storage(indices, tokens, hash_value=hashes(tokens), extra_pools=extra_pools)
    return taken(control.ack_backup_queue).completed_tokens


def fetch(control: Any, tokens: list[int], indices: torch.Tensor, extra_pools: Any = None, *, stop: bool = False) -> Any:
    """Asks for a prompt and reads what was found, as the tree does: (tokens found, tokens read, pages read by pool)."""
    operation = control.prefetch(SimpleNamespace(rid="r", generation=0), tokens, extra_pools=extra_pools)
    operation = taken(control.prefetch_hit_queue)
    found = operation.storage_hit_count
    operation.host_indices = indices[:found]
    if stop:
        control.terminate_prefetch(operation)
    control.prefetch_buffer.put(operation)
    read, pools = 0, {}
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        ack = taken(control.ack_prefetch_queue)
        read = read if ack.completed_tokens is None else ack.completed_tokens
        pools |= ack.pool_hits or {}
        if ack.completed_req:
            return found, read, pools
    raise AssertionError("no answer")
