"""SGLang's real tree with HiCache: device and host pools, controller with its threads, Forebay below. What copies between device and host
memory is torch's, since SGLang's kernels need a GPU."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import linked
import torch
import world
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

PAGE, TOKENS, LAYERS = 64, 1024, 3
#: What is waited for here is over in a moment; a test that waits for longer fails.
PATIENCE_S = 60


def kv_pool(kind: str) -> Any:
    """K and V, or latent KV, alone or with an indexer."""
    if kind == "dsa":
        return linked.dsa(LAYERS)
    common = {"size": TOKENS, "page_size": PAGE, "dtype": torch.bfloat16, "layer_num": LAYERS, **linked.COMMON}
    if kind == "mla":
        return MLATokenToKVPool(kv_lora_rank=linked.LATENT, qk_rope_head_dim=linked.ROPE, **common)
    return MHATokenToKVPool(head_num=2, head_dim=32, **common)


def _parts(host: Any, device: Any, layer: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """A layer's buffers as rows on the host and on the device, and the indices of one row."""
    if isinstance(host, DSAIndexerPoolHost):
        return [(host.index_k_with_scale_buffer[:, layer], device.index_k_with_scale_buffer[layer], PAGE)]
    if isinstance(host, MambaPoolHost):
        kinds = zip([host.temporal_buffer, *host.conv_buffer], [host.temporal_device_layers, *host.conv_device_layers], strict=True)
        return [(on_host[:, layer], on_device[layer], 1) for on_host, on_device in kinds]
    if isinstance(host, MLATokenToKVPoolHost):
        return [(host.kv_buffer[:, layer], device.kv_buffer[layer], 1)]
    return [(host.kv_buffer[0][:, layer], device.k_buffer[layer], 1), (host.kv_buffer[1][:, layer], device.v_buffer[layer], 1)]


def _load(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, io_backend: str, **_: Any) -> None:
    for host, device, step in _parts(self, device_pool, layer_id):
        rows = host[host_indices[::step] // step]
        device[device_indices[::step] // step] = rows.reshape(len(rows), *device.shape[1:])


def _back_up(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str, **_: Any) -> None:
    layers = self.num_mamba_layers if isinstance(self, MambaPoolHost) else self.layer_num
    for layer in range(layers):
        for host, device, step in _parts(self, device_pool, layer):
            rows = device[device_indices[::step] // step]
            host[host_indices[::step] // step] = rows.reshape(len(rows), *host.shape[1:])


@contextmanager
def served(cache: Path, kind: str = "mha", *, group: Any = None, rank: int = 0, size: int = 1, **more: Any) -> Iterator[Tree]:
    """A server's tree with HiCache, made as SGLang's scheduler makes it; that of one of the ranks of a `group`."""
    extra = world.extra(cache, prefetch_threshold=1, **more)
    args = ServerArgs(
        model_path="dummy",
        load_format="dummy",
        page_size=PAGE,
        enable_hierarchical_cache=True,
        hicache_io_backend="kernel",
        hicache_mem_layout="page_first",
        hicache_write_policy="write_through",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(extra),
        hicache_storage_prefetch_policy="wait_complete",
        hicache_ratio=2.0,
        context_length=TOKENS,
    )
    with ExitStack() as stack:
        ranks = {"tp_rank": rank, "tp_size": size, "attn_tp_rank": rank, "attn_tp_size": size, "moe_tp_size": size}
        stack.enter_context(get_parallel().override(pp_rank=0, pp_size=1, **ranks))
        for pool in (MHATokenToKVPoolHost, MLATokenToKVPoolHost, DSAIndexerPoolHost, MambaPoolHost):
            stack.enter_context(mock.patch.object(pool, "load_to_device_per_layer", _load))
            stack.enter_context(mock.patch.object(pool, "backup_from_device_all_layer", _back_up))
        stack.enter_context(mock.patch.object(common, "_cuda_host_register"))
        stack.enter_context(mock.patch.object(common, "_cuda_host_unregister"))
        stack.enter_context(envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override("python"))
        set_global_server_args_for_scheduler(args)
        components = [ComponentType.FULL]
        if kind == "hybrid":
            args._mamba_cache_chunk_size = PAGE
            components.append(ComponentType.MAMBA)
            requests, device = linked.hybrid()
        else:
            requests, device = ReqToTokenPool(size=16, max_context_len=TOKENS, device="cpu", enable_memory_saver=False), kv_pool(kind)
        allocator = PagedTokenToKVPoolAllocator(TOKENS, PAGE, torch.bfloat16, "cpu", device, False)
        given = CacheInitParams(
            disable=False,
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE,
            tree_components=tuple(components),
            enable_mamba_extra_buffer=kind == "hybrid",
            tp_cache_group=group,
        )
        tree = UnifiedRadixCache(given)
        tree.init_hicache(args, given)
        tree.write_through_threshold = 1
        tree.load_back_threshold = 0
        # Made for pools of another size than these.
        tree.cache_controller.prefetch_capacity_limit = TOKENS
        stack.callback(tree.shutdown)
        yield Tree(tree, allocator, device, requests)


class Tree:
    """What SGLang's scheduler does with the tree."""

    def __init__(self, tree: Any, allocator: Any, device: Any, requests: Any) -> None:
        self.tree, self.allocator, self.device, self.requests = tree, allocator, device, requests
        self.mamba = getattr(requests, "mamba_pool", None)
        self._attempts = iter(range(10_000))

    def _step_until(self, done: Callable[[], bool]) -> None:
        """Runs the scheduler's steps until `done`."""
        until = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < until, "SGLang's threads have not answered"
            self.tree.check_hicache_events()

    def compute(self, tokens: list[int], seed: int) -> list[bytes]:
        """Computes a prompt with KV of its own, and lets it go through host memory to the drive: the bytes of its pages."""
        slots = self.allocator.alloc(len(tokens))
        generator = torch.Generator().manual_seed(seed)
        for buffer, step in self._buffers():
            raw, rows = buffer.view(torch.uint8), slots[::step] // step
            raw[rows] = torch.randint(0, 256, raw[rows].shape, dtype=torch.uint8, generator=generator)
        given = InsertParams(key=RadixKey(array("q", tokens)), value=slots)
        if self.mamba is not None:
            given.mamba_value = self.requests.mamba_allocator.alloc(1)
            for buffer in self._states():
                raw = buffer.view(torch.uint8)
                raw[:, given.mamba_value] = torch.randint(0, 256, raw[:, given.mamba_value].shape, dtype=torch.uint8, generator=generator)
        self.tree.insert(given)
        self._step_until(lambda: not self.tree.ongoing_write_through and not self.tree.ongoing_backup)
        return self.content(slots, given.mamba_value)

    def fetch(self, tokens: list[int]) -> list[bytes]:
        """Has a prompt read from the drive into host memory, and from there into the device: the bytes of the pages that came."""
        request, key = CacheRequestHandle("r", next(self._attempts)), RadixKey(array("q", tokens))
        self.tree.prefetch_from_storage(request, self.tree.root_node_handle(), array("q", tokens), None, None)
        self._step_until(lambda: self.tree.check_prefetch_progress(request))
        self.tree.pop_prefetch_loaded_tokens(request)
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        if found.host_hit_length:
            assert self.tree.load_back(found.best_match_node)
            self.tree.ready_to_load_host_cache()
            self._step_until(lambda: not self.tree.ongoing_load_back)
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        assert found.host_hit_length == 0
        slots = self.tree.path_device_indices(found.last_device_node)
        return self.content(slots, self._state_of(found.last_device_node) if len(slots) else None)

    def _state_of(self, node: Any) -> Any:
        """The slot of the recurrent state after a node."""
        if self.mamba is None:
            return None
        return self.tree.tree_core.get_component_device_value(node, ComponentType.MAMBA)

    def content(self, slots: torch.Tensor, state: Any = None) -> list[bytes]:
        """All bytes of these slots, buffer by buffer, and of the recurrent state."""
        found = [linked.raw_bytes(buffer[slots[::step] // step]) for buffer, step in self._buffers()]
        if self.mamba is not None:
            found += [b"" if state is None else linked.raw_bytes(buffer[:, state]) for buffer in self._states()]
        return found

    def _states(self) -> list[torch.Tensor]:
        return [self.mamba.mamba_cache.temporal, *self.mamba.mamba_cache.conv]

    def _buffers(self) -> list[tuple[torch.Tensor, int]]:
        """The device's buffers, each with the indices of one row."""
        if hasattr(self.device, "index_k_with_scale_buffer"):
            return [*((b, 1) for b in self.device.kv_buffer), *((b, PAGE) for b in self.device.index_k_with_scale_buffer)]
        device = getattr(self.device, "full_kv_pool", self.device)
        if hasattr(device, "kv_buffer"):
            return [(b, 1) for b in device.kv_buffer]
        return [(b, 1) for b in (*self.device.k_buffer, *self.device.v_buffer)]
