"""Every physical layout that vLLM has for its KV caches: whole blocks are found as runs of bytes, or the layout is refused by name."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from forebay.vllm import geometry

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 4, 6
ITEM = 2


def caches(layout: KVCacheLayout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """All memory in the order in which it lies, and each layer as vLLM registers it: `[B, H, N, C]` by its strides."""
    sizes = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
    memory = torch.arange(LAYERS * BLOCKS * HEADS * TOKENS * CONTENT, dtype=torch.int16)
    physical = memory.view([sizes[axis] for axis in layout.value])
    logical = physical.permute([layout.value.index(axis) for axis in range(5)])
    return memory, {f"model.layers.{i}.attn": logical[i] for i in range(LAYERS)}


def shape() -> geometry.Shape:
    size = HEADS * TOKENS * CONTENT * ITEM
    layers = tuple(geometry.Layer(f"model.layers.{i}.attn", 0, TOKENS, size) for i in range(LAYERS))
    return geometry.Shape(layers, (TOKENS,), BLOCKS, (None,), geometry.Ranks(1, 1, 1))


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda l: l.name)
def test_blocks_are_views_of_their_own_bytes(layout: KVCacheLayout) -> None:
    memory, tensors = caches(layout)
    seen = set()
    for blocks, tensor in zip(geometry.views(shape(), tensors), tensors.values(), strict=True):
        assert blocks.pieces == (1 if layout.is_block_compact else HEADS)
        view = blocks.view
        for block in range(BLOCKS):
            words = view[block].view(torch.int16).flatten().tolist()
            assert sorted(words) == sorted(tensor[block].flatten().tolist())
            seen.update(words)
        view[BLOCKS - 1] = 255
        assert (tensor[BLOCKS - 1] == -1).all(), "the same memory, no copy"
    assert seen == set(range(len(memory))), "every byte belongs to one block"


def test_blocks_that_are_no_equal_runs_are_refused_with_what_to_do() -> None:
    # Kernel blocks of one block, and heads apart between them: runs at two distances.
    memory = torch.zeros(2 * BLOCKS, HEADS, LAYERS, TOKENS // 2, CONTENT, dtype=torch.int16)
    tensors = {layer.name: memory[:, :, i] for i, layer in enumerate(shape().layers)}
    with pytest.raises(geometry.Unsupported, match="VLLM_KV_CACHE_LAYOUT"):
        geometry.views(shape(), tensors)


def test_kernel_blocks_with_heads_outermost_are_taken_together() -> None:
    memory = torch.arange(HEADS * BLOCKS * TOKENS * CONTENT, dtype=torch.int16).view(HEADS, 2 * BLOCKS, TOKENS // 2, CONTENT)
    one = geometry.Shape(shape().layers[:1], (TOKENS,), BLOCKS, (None,), geometry.Ranks(1, 1, 1))
    (blocks,) = geometry.views(one, {"model.layers.0.attn": memory.transpose(0, 1)})
    words = blocks.view[1].view(torch.int16).flatten().tolist()
    assert sorted(words) == sorted(memory[:, 2:4].flatten().tolist())
    assert blocks.kernel_tokens == TOKENS // 2


def test_kernel_blocks_of_one_block_are_taken_together() -> None:
    memory = torch.arange(BLOCKS * HEADS * TOKENS * CONTENT, dtype=torch.int16)
    halves = memory.view(2 * BLOCKS, HEADS, TOKENS // 2, CONTENT)
    one = geometry.Shape(shape().layers[:1], (TOKENS,), BLOCKS, (None,), geometry.Ranks(1, 1, 1))
    (blocks,) = geometry.views(one, {"model.layers.0.attn": halves})
    assert blocks.view[1].view(torch.int16).tolist() == halves[2:4].flatten().tolist()
    assert blocks.kernel_tokens == TOKENS // 2, "heads lie otherwise than in one block"


def test_a_layer_that_was_not_registered_is_named() -> None:
    tensors = caches(KVCacheLayout.LBHNC)[1]
    del tensors["model.layers.1.attn"]
    with pytest.raises(geometry.Unsupported, match="model.layers.1.attn"):
        geometry.views(shape(), tensors)
