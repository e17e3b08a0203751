"""SGLang's real tree, device pools, factory and wrapper on CPU tensors, with Forebay as linker; the forward pass is the test's."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import world
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool, HybridReqToTokenPool, MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

PAGE, TOKENS, LAYERS, LATENT, ROPE = 64, 2048, 4, 128, 32
#: Of the model with recurrent layers: those with attention, and the others.
ATTENTION, RECURRENT = [1, 3], [0, 2]
#: What is waited for in vain fails its test, and does not hang it.
PATIENCE_S = 400
COMMON = {"device": "cpu", "enable_memory_saver": False}


def dsa(layers: int = LAYERS) -> Any:
    """Latent KV with the keys of an indexer (DeepSeek V3.2)."""
    return DSATokenToKVPool(
        size=TOKENS,
        page_size=PAGE,
        kv_lora_rank=LATENT,
        dtype=torch.bfloat16,
        qk_rope_head_dim=ROPE,
        layer_num=layers,
        index_head_dim=128,
        kv_cache_dim=LATENT + ROPE,
        **COMMON,
    )


def draft() -> Any:
    """A draft model's own KV, in the slots of the target's."""
    return MHATokenToKVPool(size=TOKENS, page_size=PAGE, dtype=torch.bfloat16, head_num=1, head_dim=16, layer_num=1, **COMMON)


def hybrid() -> tuple[Any, Any]:
    """Latent KV in some layers and recurrent state in the others (Kimi Linear): the pools of requests and of KV."""
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=2, head_dim=16, state_size=16, conv_kernel=4
    )
    requests = HybridReqToTokenPool(
        size=16,
        mamba_size=48,
        mamba_spec_state_size=16,
        max_context_len=TOKENS,
        cache_params=Mamba2CacheParams(shape=shape, layers=RECURRENT),
        mamba_layer_ids=RECURRENT,
        enable_mamba_extra_buffer=True,
        speculative_num_draft_tokens=3,
        **COMMON,
    )
    kv = HybridLinearKVPool(
        size=TOKENS,
        dtype=torch.bfloat16,
        page_size=PAGE,
        head_num=1,
        head_dim=LATENT,
        full_attention_layer_ids=ATTENTION,
        mamba_pool=requests.mamba_pool,
        use_mla=True,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        **COMMON,
    )
    return requests, kv


@contextmanager
def served(
    cache: Path,
    kind: str = "dsa",
    *,
    more: dict[str, Any] | None = None,
    group: Any = None,
    drafts: bool = False,
    backend: str = "dynamic",
    **params: Any,
) -> Iterator[Server]:
    """A server's cache with Forebay linked to it by SGLang's factory."""
    args = world.server_args()
    components = [ComponentType.FULL]
    if kind == "dsa":
        requests, kv = ReqToTokenPool(size=16, max_context_len=TOKENS, **COMMON), dsa()
        beside = {"mtp_draft_device_pools": (dsa(1),) if drafts else ()}
    elif kind == "plain":
        requests, kv, beside = ReqToTokenPool(size=16, max_context_len=TOKENS, **COMMON), draft(), {}
    else:
        args._mamba_cache_chunk_size = PAGE
        requests, kv = hybrid()
        beside = {"sidecar_draft_device_pools": (draft(),) if drafts else ()}
        components.append(ComponentType.MAMBA)
    allocator = PagedTokenToKVPoolAllocator(TOKENS, PAGE, torch.bfloat16, "cpu", kv, False)
    given = CacheInitParams(
        disable=False,
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE,
        tree_components=tuple(components),
        enable_mamba_extra_buffer=kind == "hybrid",
        tp_cache_group=group,
        **beside,
        **params,
    )
    config = {
        "linker": "Linker",
        "linker_module_path": "forebay.sglang",
        "linker_extra_config": {"cache_dir": str(cache), "capacity": "1GiB", "min_free": 0, **(more or {})},
    }
    with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override("python"):
        tree = UnifiedRadixCache(given)
    linker = create_unified_cache_linker(args, given, backend=backend, config=config, components=set(tree.components))
    tree.init_cache_linker(linker)
    kv.register_layer_transfer_counter(linker.layer_done_counter)
    try:
        yield Server(tree, linker, requests, allocator, kv)
    finally:
        linker.close()


class Server:
    """What SGLang's scheduler does with the tree, one request at a time."""

    def __init__(self, tree: Any, linker: Any, requests: Any, allocator: Any, kv: Any) -> None:
        self.tree, self.linker, self.requests, self.allocator, self.kv = tree, linker, requests, allocator, kv
        self._rids = iter(range(10_000))
        self.seen: dict[str, list[list[bytes]]] = {}

    def request(self, tokens: list[int]) -> Any:
        """A request as the scheduler has it when it comes."""
        made = Req(
            rid=f"r{next(self._rids)}",
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )
        self.requests.alloc([made])
        made.last_node, made.extra_key = self.tree.root_node_handle(), None
        made.kv.cache_protected_len = 0
        return made

    def match(self, req: Any) -> int:
        """Tokens that the tree says could be loaded."""
        found = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(req.origin_input_ids), req=req))
        req.prefix_len, req.last_node, req.last_host_node = found.device_prefix_len, found.last_device_node, found.last_host_node
        req.best_match_node, req.host_hit_length = found.best_match_node, found.host_hit_length
        return found.host_hit_length

    def admit(self, req: Any) -> int:
        """Tokens whose load was queued; 0 where they are computed instead."""
        given = InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
        return self.tree.init_load_back(given)[0]

    @property
    def layers(self) -> int:
        return self.linker.layer_done_counter.num_layers

    def forward(self, reqs: list[Any], keep: Iterable[Any] = ()) -> list[Any]:
        """A forward pass that waits for each layer, as the model does; the requests that SGLang then ends with an error. `seen` has
        what the pass saw of the requests to `keep`."""
        counter = self.linker.layer_done_counter
        counter.set_consumer(self.tree.ready_to_load_host_cache())
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
        self.seen |= {req.rid: self.loaded(req) for req in keep}
        return self.tree.finish_external_linker_loads(reqs)

    def compute(self, tokens: list[int], seed: int) -> list[list[bytes]]:
        """Computes a prompt with KV of its own, and lets the tree have it: the bytes of its pages."""
        slots = self.allocator.alloc(len(tokens))
        generator = torch.Generator().manual_seed(seed)
        for rows, indices in self._rows(slots):
            for buffer in rows:
                raw = buffer.view(torch.uint8)
                raw[indices] = torch.randint(0, 256, raw[indices].shape, dtype=torch.uint8, generator=generator)
        given = InsertParams(key=RadixKey(array("q", tokens)), value=slots)
        state = None
        if self.mamba is not None:
            state = self.requests.mamba_allocator.alloc(1)
            for buffer in self._states():
                raw = buffer.view(torch.uint8)
                raw[:, state] = torch.randint(0, 256, raw[:, state].shape, dtype=torch.uint8, generator=generator)
            given.mamba_value = state
        self.tree.insert(given)
        return self.content(slots, state)

    def settle(self) -> list[bool]:
        """Lets all offloads end; what each came to."""
        assert self.linker._saver.idle(PATIENCE_S)
        for offload in self.linker._offloads:
            for store, _ in offload.stores:
                store.wait()
        results: list[bool] = []
        take = self.tree.linker.take_completed_offloads
        self.tree.linker.take_completed_offloads = lambda count: results.extend(found := take(count)) or found
        self.tree.check_hicache_events()
        self.tree.linker.take_completed_offloads = take
        return results

    def content(self, slots: torch.Tensor, state: torch.Tensor | None = None) -> list[list[bytes]]:
        """All bytes of these slots, buffer by buffer, and of the state."""
        found = [[raw_bytes(buffer[indices]) for buffer in rows] for rows, indices in self._rows(slots)]
        if state is not None:
            found.append([raw_bytes(buffer[:, state]) for buffer in self._states()])
        return found

    def loaded(self, req: Any) -> list[list[bytes]]:
        """What a request's load brought."""
        state = None if self.mamba is None else req.kv.mamba_pool_idx.reshape(1)
        return self.content(self.tree.linker.private_load_indices[req.rid], state)

    @property
    def mamba(self) -> Any:
        return getattr(self.requests, "mamba_pool", None)

    def _rows(self, slots: torch.Tensor) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
        """The buffers of each pool, with the rows of them that the slots are."""
        found = []
        for entry in self.linker.pools.values():
            if entry.indices_from_pool == "kv":
                by_page = entry.kv_buffer[0].shape[0] < TOKENS
                found.append((entry.kv_buffer, slots[::PAGE] // PAGE if by_page else slots))
        return found

    def _states(self) -> list[torch.Tensor]:
        return [self.mamba.mamba_cache.temporal, *self.mamba.mamba_cache.conv]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def prompt(pages: int, salt: int = 0) -> list[int]:
    """Tokens of so many full pages."""
    return [salt * 100_000 + at for at in range(pages * PAGE)]
