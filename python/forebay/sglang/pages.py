"""How a page of one of SGLang's host pools is stored: where its bytes lie, and which of the pool's properties are in its key.

A page is one value. Where the pool says where a page's regions lie (`get_page_buffer_meta`), they are the value's spans and nothing is
copied; otherwise the page goes through the pool's own flat form. The two forms order bytes differently, so a key tells them apart.

Invariants:
- Two pools have the same tag only if a page of one is, byte for byte, a page of the other.
- A rank's own KV is never found by another rank; what all tensor-parallel ranks hold alike is found by all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import forebay
import torch
from forebay.sglang.identity import digest

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

#: Memory as the object store takes it: address, shape, strides, bytes of an element, device.
Span = tuple[int, tuple[int], None, int, str]

#: The properties of host pools that decide what a page's bytes mean; a pool has some of them.
PROPERTIES = (
    "dtype",
    "layout",
    "page_size",
    "slot_page_size",
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_cache_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "size_per_token",
    "storage_format_tag",
    "item_bytes",
    "indexer_dtype",
    "indexer_page_stride_size",
    "num_mamba_layers",
    "temporal_dtype",
    "temporal_state_shape",
    "conv_dtype",
    "conv_state_shapes",
    "ring_size",
)


@dataclass(frozen=True)
class Pages:
    """One registered pool."""

    pool: Any
    page_size: int
    """Indices of one page."""
    tag: str
    """What the keys of its pages begin with."""
    regions: tuple[int, ...]
    """Bytes of each region of a page; none where pages go through the flat form."""
    is_logical: bool = False
    """It has indices and no bytes: other pools hold what belongs to them."""

    @staticmethod
    def of(name: str, pool: Any, config: HiCacheStorageConfig, in_place: bool) -> Pages:
        """Looks at a pool. With `in_place` its regions are used where it can say where they lie."""
        from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
        from sglang.srt.mem_cache.pool_host.base import HostKVCache

        if isinstance(pool, LogicalHostPool):
            return Pages(pool, pool.page_size, f"{name}-logical", (), is_logical=True)
        if not isinstance(pool, HostKVCache):
            raise forebay.Unsupported(
                f"SGLang's pool {name} is a {type(pool).__name__}: its pages are divided among ranks, or shared by several pools; "
                "start SGLang without page interleaving and without unified memory, or without Forebay"
            )
        if config.is_mla_model and config.tp_size > 1 and name != "mamba" and not _is_alike(pool):
            raise forebay.Unsupported(
                f"SGLang's pool {name} ({type(pool).__name__}) is divided among {config.tp_size} tensor-parallel ranks beside MLA, and "
                "SGLang stores the part of the first rank alone; start SGLang without the draft model, with --tp-size 1, or without Forebay"
            )
        page_size = getattr(pool, "page_size", 1) or 1
        regions = _regions(pool, page_size) if in_place else ()
        flat = None if regions else _flat_bytes(name, pool, page_size)
        described = {key: str(getattr(pool, key)) for key in PROPERTIES if hasattr(pool, key)}
        what = digest([name, type(pool).__name__, described, regions, flat])
        return Pages(pool, page_size, f"{name}-{what}-{_rank(pool, config)}", regions)

    @property
    def dtype(self) -> Any:
        """Of the numbers in it; None where the pool does not say."""
        return getattr(self.pool, "dtype", None)

    def key(self, page: str) -> str:
        """The key of the page that SGLang calls `page`."""
        return f"{self.tag}/{page}"

    def spans(self, count: int, indices: torch.Tensor) -> list[list[Span]]:
        """The regions of each of `count` pages whose indices are given."""
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        each = len(self.regions)
        if len(addresses) != count * each or tuple(sizes) != self.regions * count:
            raise ValueError(f"{len(addresses)} regions for {count} pages of {each}")
        spans = [(int(address), (int(size),), None, 1, "cpu") for address, size in zip(addresses, sizes)]
        return [spans[at * each : (at + 1) * each] for at in range(count)]

    def memories(self) -> list[torch.Tensor]:
        """The pool's buffers, to be registered with the drives' queues; none where pages are copied."""
        if not self.regions:
            return []
        given = getattr(self.pool, "get_hybrid_pool_buffer", None)
        buffers = given() if given is not None else getattr(self.pool, "kv_buffer", None)
        if isinstance(buffers, torch.Tensor):
            buffers = [buffers]
        return [buffer for buffer in buffers or () if isinstance(buffer, torch.Tensor) and buffer.numel()]


def span_of(tensor: torch.Tensor) -> Span:
    """A contiguous tensor in host memory as one span."""
    return (tensor.data_ptr(), (tensor.numel() * tensor.element_size(),), None, 1, "cpu")


def _regions(pool: Any, page_size: int) -> tuple[int, ...]:
    """Bytes of each region of a page; none where the pool cannot say."""
    describe = getattr(pool, "get_page_buffer_meta", None)
    if describe is None:
        return ()
    try:
        described = describe(torch.arange(page_size, dtype=torch.int64))
    except (AssertionError, AttributeError, NotImplementedError, ValueError):
        # This layout has no regions, or the page has state beside them.
        return ()
    return tuple(int(size) for size in described[1]) if described else ()


def _flat_bytes(name: str, pool: Any, page_size: int) -> int:
    """Bytes of a page's flat form; refuses a pool that has neither form."""
    try:
        pool.get_data_page(0)
        page = pool.get_dummy_flat_data_page()
    except (NotImplementedError, ValueError) as error:
        layout = getattr(pool, "layout", None)
        has_regions = bool(_regions(pool, page_size))
        advice = 'give "interface_v1": 1 in the extra config' if has_regions else "start SGLang with --hicache-mem-layout page_first"
        raise forebay.Unsupported(
            f"SGLang's pool {name} ({type(pool).__name__}) cannot copy a page of layout {layout}, or say where it lies: {error}; {advice}"
        ) from error
    return page.numel() * page.element_size()


def _is_alike(pool: Any) -> bool:
    """Whether all tensor-parallel ranks of an MLA model hold the same bytes in it."""
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    return isinstance(pool, (MLATokenToKVPoolHost, DSAIndexerPoolHost, DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool))


def _rank(pool: Any, config: HiCacheStorageConfig) -> str:
    """Whose page it is: the ranks that hold different bytes."""
    parts = [f"pp{config.pp_rank}of{config.pp_size}", f"cp{config.attn_cp_rank}of{config.attn_cp_size}"]
    if not (config.is_mla_model and _is_alike(pool)):
        # Also beside MLA: Mamba state is divided among the ranks, and each of them stores its own.
        parts.append(f"tp{config.tp_rank}of{config.tp_size}")
    return "-".join(parts)
