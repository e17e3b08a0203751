"""What vLLM's configuration says about the KV: the engine's `Geometry`, and its tensors as blocks of bytes.

A worker computes the geometry from the configuration and from how its tensors lay out a block. It
reports the geometry to the scheduler's half, which looks up in the same namespace: vLLM's scheduler
knows neither the layers of other pipeline stages nor those whose specs differ within a group. A
block of a layer is
stored byte for byte. Attention backends order the bytes as they like (the CPU's keeps K and V in
halves of each head), so the backend, the layout and vLLM's version are part of the identity.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forebay.vllm import identity
from forebay.vllm.settings import Settings

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


logger = logging.getLogger("vllm.forebay")


class Unsupported(ValueError):
    """This server's KV cannot be stored; the message says why and what to do."""


@dataclass(frozen=True)
class Layer:
    """One layer's KV."""

    name: str
    group: int
    """KV cache group."""
    block_tokens: int
    block_bytes: int


@dataclass(frozen=True)
class Ranks:
    """How vLLM's workers share the KV: ranks count tensor-parallel first, then pipeline stages."""

    tp: int
    pp: int
    cp: int
    """Ranks of decode context parallelism, which are among those of tensor parallelism: each has every `cp`-th run of tokens."""

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Ranks:
        """As configured."""
        parallel = vllm_config.parallel_config
        return cls(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size, getattr(parallel, "decode_context_parallel_size", 1)
        )

    @property
    def workers(self) -> int:
        """Workers of one scheduler."""
        return self.tp * self.pp

    def block_tokens(self, spec: KVCacheSpec) -> int:
        """Tokens of the request that one of vLLM's blocks stands for: on each rank it holds its share of them."""
        return spec.block_size * (self.cp if getattr(spec, "dcp_sharded", False) else 1)


@dataclass(frozen=True)
class Shape:
    """The KV of one rank."""

    layers: tuple[Layer, ...]
    """In the order in which they are computed."""
    block_tokens: tuple[int, ...]
    """Tokens of a block, per KV cache group."""
    num_blocks: int
    windows: tuple[int | None, ...]
    """Tokens of a group's sliding window, whose older blocks vLLM takes back while the request runs; None where it keeps all."""
    ranks: Ranks
    is_same_on_all_ranks: bool = False
    """Every tensor-parallel rank computes the same KV, as with MLA: it is stored once, and all ranks load it."""

    @property
    def own(self) -> int:
        """Tensor-parallel ranks that have KV of their own; the others have that of an earlier one."""
        return self.ranks.cp if self.is_same_on_all_ranks else self.ranks.tp


@dataclass(frozen=True)
class Blocks:
    """One layer's blocks in vLLM's memory."""

    view: torch.Tensor
    """`[num_blocks, block_bytes]`; where a block lies in pieces, `[num_blocks, block_tokens, pieces, bytes]`: an equal share of every piece
    counts as a token's, since whole blocks are moved both ways alike."""
    kernel_tokens: int
    """Tokens of a kernel block: the backend may split vLLM's blocks."""
    pieces: int
    """Runs of bytes of a block: more than one where its heads are apart (vLLM's layouts LHBNC and BHLNC)."""


def shape(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Shape:
    """The layers that are stored, or `Unsupported`."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    if getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1) > 1:
        raise Unsupported(
            "prefill context parallelism is not supported: which of its ranks share KV could not be tried; start without "
            "--prefill-context-parallel-size"
        )
    ranks = Ranks.of(vllm_config)
    layers: list[Layer] = []
    block_tokens: list[int] = []
    windows: list[int | None] = []
    latent: list[bool] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        block_tokens.append(ranks.block_tokens(group.kv_cache_spec))
        # A pipeline stage may have no layer of a group.
        kept = set() if group.layer_names else {_window(f"group {index}", group.kv_cache_spec)}
        for name in group.layer_names:
            spec = specs[name] if specs is not None else group.kv_cache_spec
            kept.add(_window(name, spec))
            latent.append(isinstance(spec, MLAAttentionSpec))
            layers.append(Layer(name, index, ranks.block_tokens(spec), spec.real_page_size_bytes))
        windows.append(min((window for window in kept if window is not None), default=None))
    if not layers:
        raise Unsupported("this model, or one stage of its pipeline, has no KV cache to store; start without the connector")
    layers.sort(key=lambda layer: (_numbers(layer.name), layer.name))
    return Shape(tuple(layers), tuple(block_tokens), kv_cache_config.num_blocks, tuple(windows), ranks, all(latent))


def _window(name: str, spec: KVCacheSpec) -> int | None:
    """The tokens whose blocks a running request keeps for this layer, or None for all of them; `Unsupported` where there are
    no token blocks to store."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, RSWASpec, SlidingWindowSpec

    if isinstance(spec, MambaSpec):
        raise Unsupported(f"{name} keeps recurrent state, which has no token blocks to store; this model cannot be cached")
    if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec):
        raise Unsupported(f"{name}: KV of kind {type(spec).__name__} is not supported")
    if spec.tokens_per_state != 1:
        raise Unsupported(f"{name}: compressed KV ({spec.tokens_per_state} tokens per state) is not supported")
    if getattr(spec, "non_causal", False):
        raise Unsupported(f"{name} attends to later tokens too, so no prefix has KV of its own; this model cannot be cached")
    if isinstance(spec, RSWASpec):
        return spec.rswa_window
    # Under --disable-hybrid-kv-cache-manager such layers have a FullAttentionSpec and keep all
    # their blocks.
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", name))


def geometry(vllm_config: VllmConfig, kv: Shape, rank: int, blocks: list[Blocks]) -> Any:
    """The engine's geometry of one worker with these blocks."""
    import forebay

    stage, tp_rank = divmod(rank, kv.ranks.tp)
    # Where heads come before tokens within a block, the order of its bytes depends on how many
    # tokens it has, and how many a kernel block has.
    whole = [(layer, of) for layer, of in zip(kv.layers, blocks, strict=True) if of.pieces == 1]
    ordered = sorted({(layer.block_tokens, of.kernel_tokens) for layer, of in whole})
    # With MLA, ranks differ in nothing but the tokens that they have.
    tp = (0, 1) if kv.is_same_on_all_ranks else (tp_rank, kv.ranks.tp)
    return forebay.Geometry(
        model=vllm_config.model_config.model,
        # Only the engine's codec looks at the type; the fingerprint has it in any case.
        dtype="bfloat16" if identity.kv_dtype(vllm_config) == "bfloat16" else "uint8",
        # No addition: the engine adds the setting `fingerprint` itself.
        fingerprint=identity.fingerprint(vllm_config, "", ordered),
        layer_specs=[_spec(layer, of) for layer, of in zip(kv.layers, blocks, strict=True)],
        tp=tp,
        pp=(stage, kv.ranks.pp),
        cp=(tp_rank % kv.ranks.cp, kv.ranks.cp),
    )


def _spec(layer: Layer, blocks: Blocks) -> dict[str, Any]:
    if blocks.pieces == 1:
        return {"kind": "opaque", "block_tokens": layer.block_tokens, "block_bytes": layer.block_bytes, "group": layer.group}
    size = layer.block_bytes // layer.block_tokens // blocks.pieces
    return {"kind": "full", "planes": 1, "heads": blocks.pieces, "head_bytes": size, "group": layer.group}


def fitted(kv: Shape, settings: Settings) -> Settings:
    """The settings with chunks that fit this server: whole blocks of every KV cache group, also on workers that have no layer of
    some, and where layers have sliding windows, no longer than what a window keeps."""
    from forebay.connector import chunk_tokens

    asked = chunk_tokens(settings.engine, list(kv.block_tokens), [None] * len(kv.windows))
    fits = chunk_tokens(settings.engine, list(kv.block_tokens), list(kv.windows))
    if fits != asked:
        logger.info("chunk_size is %d instead of %d: sliding windows of %s tokens keep no more", fits, asked, kv.windows)
    return replace(settings, engine=settings.engine | {"chunk_size": fits})


def options(vllm_config: VllmConfig, kv: Shape, settings: Settings) -> dict[str, Any]:
    """Options that both state machines share."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    most: dict[str, Any] = {}
    # Every request of a producer ends with its prefill, and its blocks wait for the copies.
    if transfer.kv_role == "kv_producer" and settings.resolved["max_held_blocks"] is None:
        most["max_held_blocks"] = max(kv.num_blocks // 2, 1)
    return most | {
        "block_tokens": list(kv.block_tokens),
        "num_blocks": kv.num_blocks,
        "windows": list(kv.windows),
        "role": transfer.kv_role,
        "layerwise": settings.layerwise,
        "events": events_wanted(vllm_config),
        "workers": kv.ranks.workers,
        "writers": kv.own * kv.ranks.pp,
        "prefetch": settings.prefetch,
        # A request may only wait for another one's load where vLLM then finds the blocks in its own
        # prefix cache.
        "join_loads": bool(vllm_config.cache_config.enable_prefix_caching),
    }


def events_wanted(vllm_config: VllmConfig) -> bool:
    """Whether this server publishes KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


def views(kv: Shape, kv_caches: dict[str, torch.Tensor]) -> list[Blocks]:
    """Each layer's tensor as blocks of bytes, in the order of `kv.layers`; nothing is copied."""
    missing = [layer.name for layer in kv.layers if layer.name not in kv_caches]
    if missing:
        raise Unsupported(f"vLLM registered no KV cache for {missing[0]} and {len(missing) - 1} more layers")
    return [_blocks_of(layer, kv_caches[layer.name], kv.num_blocks) for layer in kv.layers]


def _blocks_of(layer: Layer, tensor: torch.Tensor, num_blocks: int) -> Blocks:
    import torch

    size, split = tensor.element_size(), tensor.shape[0] // max(num_blocks, 1)
    run, apart = 1, []
    for stride, length in sorted((s, n) for n, s in zip(tensor.shape[1:], tensor.stride()[1:]) if n > 1):
        if stride == run and not apart:
            run *= length
        else:
            apart.append((stride, length))
    pieces, step = (apart[0][1], apart[0][0]) if apart else (1, 0)
    # vLLM splits its blocks into `split` kernel blocks where the backend wants smaller ones; they
    # lie side by side.
    piece = run * size * split
    whole = split >= 1 and tensor.shape[0] == num_blocks * split and (split == 1 or tensor.stride(0) == run)
    fits = pieces == 1 or piece % layer.block_tokens == 0
    if not whole or len(apart) > 1 or piece * pieces != layer.block_bytes or not fits:
        raise Unsupported(
            f"{layer.name}: blocks of shape {tuple(tensor.shape)} and strides {tensor.stride()} are not "
            f"{num_blocks} times {layer.block_bytes} bytes in equal runs; set VLLM_KV_CACHE_LAYOUT to a layout with whole blocks "
            "per layer, such as NHD or HND"
        )
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    first, stride = tensor.storage_offset() * size, tensor.stride(0) * size * split
    if pieces == 1:
        return Blocks(raw.as_strided((num_blocks, piece), (stride, 1), first), layer.block_tokens // split, 1)
    token = piece // layer.block_tokens
    shape = (num_blocks, layer.block_tokens, pieces, token)
    return Blocks(raw.as_strided(shape, (stride, token, step * size, 1), first), layer.block_tokens // split, pieces)
