"""A round trip in every layout, byte by byte; shapes that cannot be told apart are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BLOCK, BLOCKS, DIM, HEADS, LAYERS, config, geometry, slots

import forebay

TOKENS = list(range(64))

SHAPES: dict[str, tuple[int, ...]] = {
    "PBTHD": (2, BLOCKS, BLOCK, HEADS, DIM),
    "PBHTD": (2, BLOCKS, HEADS, BLOCK, DIM),
    "BPTHD": (BLOCKS, 2, BLOCK, HEADS, DIM),
    "BPHTD": (BLOCKS, 2, HEADS, BLOCK, DIM),
    "BTHR": (BLOCKS, BLOCK, HEADS, 2 * DIM),
    "BHTR": (BLOCKS, HEADS, BLOCK, 2 * DIM),
}


def filled(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return rng.random(shape, dtype=np.float32)


def canonical(kv: Any, letters: str) -> Any:
    """The same elements as [planes, blocks, tokens, heads, dim]."""
    if "R" in letters:
        kv = kv.reshape(*kv.shape[:-1], 2, DIM)
        letters = letters.replace("R", "PD")
    return np.transpose(kv, [letters.index(c) for c in "PBTHD"])


def rows(kv: Any, letters: str, tokens: int) -> Any:
    at = slots(tokens)
    flat = canonical(kv, letters).reshape(2, BLOCKS * BLOCK, HEADS, DIM)
    return flat[:, at]


def engine(cache: Path, **more: Any) -> forebay.Engine:
    return forebay.Engine(config(cache), geometry(**more))


@pytest.mark.parametrize("letters", SHAPES)
def test_a_round_trip_in_each_layout(cache: Path, letters: str) -> None:
    rng = np.random.default_rng(1)
    source = [filled(rng, SHAPES[letters]) for _ in range(LAYERS)]
    target = [np.zeros_like(layer) for layer in source]
    with engine(cache) as eng:
        stored = eng.store(TOKENS, source, slots(64), wait_for_staging=True).wait()
        assert (stored.stored, stored.tokens) == (2, 64)
        assert eng.lookup(TOKENS) == 64
        result = eng.load(TOKENS, target, slots(64)).wait()
    assert (result.tokens, result.failed_blocks) == (64, [])
    unused = np.ones(BLOCKS * BLOCK, dtype=bool)
    unused[slots(64)] = False
    for before, after in zip(source, target, strict=True):
        assert np.array_equal(rows(before, letters, 64), rows(after, letters, 64))
        flat = canonical(after, letters).reshape(2, BLOCKS * BLOCK, HEADS, DIM)
        assert not flat[:, unused].any(), "only the mapped slots are written"


def test_what_one_layout_stored_another_loads(cache: Path) -> None:
    rng = np.random.default_rng(2)
    source = [filled(rng, SHAPES["PBTHD"]) for _ in range(LAYERS)]
    pairs = [tuple(np.zeros((BLOCKS, HEADS, BLOCK, DIM), np.float32) for _ in range(2)) for _ in range(LAYERS)]
    with engine(cache) as eng:
        eng.store(TOKENS, source, slots(64), wait_for_staging=True).wait()
        assert eng.load(TOKENS, pairs, slots(64)).wait().tokens == 64
    for before, pair in zip(source, pairs, strict=True):
        assert np.array_equal(rows(before, "PBTHD", 64), rows(np.stack(pair), "PBHTD", 64))


def test_views_of_a_cross_layer_tensor_keep_their_strides(cache: Path) -> None:
    rng = np.random.default_rng(3)
    whole = filled(rng, (BLOCKS, LAYERS, HEADS, BLOCK, 2 * DIM))
    back = np.zeros_like(whole)
    with engine(cache) as eng:
        eng.store(TOKENS, [whole[:, i] for i in range(LAYERS)], slots(64), wait_for_staging=True).wait()
        assert eng.load(TOKENS, [back[:, i] for i in range(LAYERS)], slots(64)).wait().tokens == 64
    used = sorted({s // BLOCK for s in slots(64)})
    assert np.array_equal(whole[used], back[used])


def test_mla_rows_and_opaque_blocks(cache: Path) -> None:
    rng = np.random.default_rng(4)
    specs = [
        {"kind": "mla", "head_bytes": 576},
        {"kind": "opaque", "block_tokens": BLOCK, "block_bytes": 4096},
        {"kind": "sliding", "window": 16, "heads": HEADS, "head_bytes": 64, "group": 1},
    ]
    source = [
        rng.integers(0, 255, (BLOCKS, BLOCK, 576), dtype=np.uint8),
        filled(rng, (BLOCKS, 2, 16, 32)),
        filled(rng, SHAPES["BPTHD"]),
    ]
    target = [np.zeros_like(layer) for layer in source]
    maps = [slots(64), slots(64)]
    with engine(cache, layer_specs=specs, layers=None) as eng:
        eng.store(TOKENS, source, maps, wait_for_staging=True).wait()
        assert eng.load(TOKENS, target, maps).wait().tokens == 64
    used = sorted({s // BLOCK for s in slots(64)})
    for before, after in zip(source, target, strict=True):
        assert np.array_equal(before[used], after[used])


def test_a_preset_has_shapes_and_is_told_its_rank_and_weights() -> None:
    def of(**more: Any) -> str:
        return forebay.Geometry.preset("llama-3.1-70b-tp8", **more).namespace

    assert of() == of(tp=(0, 1), fingerprint="", identity={})
    ranks = [of(tp=(rank, 8), fingerprint="weights 1") for rank in range(8)]
    # Ranks share a namespace and are shards of it.
    assert len({of(), *ranks, of(tp=(0, 8), fingerprint="weights 2"), of(identity={"rope": "yarn"})}) == 4
    with pytest.raises(forebay.InvalidInput, match="not below its size"):
        of(tp=(8, 8))


def test_a_shape_that_could_be_two_layouts_is_refused_until_it_is_named() -> None:
    square = geometry(kv_heads=BLOCK)
    layers = [np.zeros((2, BLOCKS, BLOCK, BLOCK, DIM), np.float32) for _ in range(LAYERS)]
    with pytest.raises(forebay.InvalidInput, match=r"layer 0: .*ambiguous.*PBTHD or PBHTD") as raised:
        forebay.PagedKv(square, layers)
    assert "layout" in str(raised.value.advice)
    nhd, hnd = (forebay.PagedKv(square, layers, layout=name).strides(0)[0] for name in ("NHD", "HND"))
    assert nhd[2:] == (BLOCK * DIM * 4, DIM * 4) and hnd[2:] == (DIM * 4, BLOCK * DIM * 4)
    two = [np.zeros((2, 2, BLOCK, HEADS, DIM), np.float32) for _ in range(LAYERS)]
    with pytest.raises(forebay.InvalidInput, match="ambiguous"):
        forebay.PagedKv(geometry(), two)
    assert forebay.PagedKv(geometry(), two, layout="BPTHD").num_blocks == [2] * LAYERS
    assert forebay.PagedKv(geometry(), two, layout="PBTHD", block_tokens=BLOCK).block_tokens == [BLOCK] * LAYERS


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((2, BLOCKS, BLOCK, HEADS, DIM + 1), "no paged KV"),
        ((3, BLOCKS, BLOCK, HEADS, DIM), "no paged KV"),
        ((BLOCKS, BLOCK), "no paged KV"),
    ],
)
def test_a_shape_that_is_no_layout_is_refused(shape: tuple[int, ...], why: str) -> None:
    with pytest.raises(forebay.InvalidInput, match=why):
        forebay.PagedKv(geometry(), [np.zeros(shape, np.float32)] * LAYERS)


def test_memory_that_cannot_be_used_is_refused() -> None:
    good = [np.zeros(SHAPES["PBTHD"], np.float32) for _ in range(LAYERS)]
    with pytest.raises(forebay.InvalidInput, match="2 KV layers for a geometry of 3"):
        forebay.PagedKv(geometry(), good[:2])
    good[1].flags.writeable = False
    with pytest.raises(forebay.InvalidInput, match="layer 1: its memory is read-only"):
        forebay.PagedKv(geometry(), good)
    with pytest.raises(forebay.InvalidInput, match="negative stride"):
        forebay.PagedKv(geometry(), [good[0][:, ::-1], *good[1:]])
    with pytest.raises(forebay.InvalidInput, match="is no memory"):
        forebay.PagedKv(geometry(), [object()] * LAYERS)
