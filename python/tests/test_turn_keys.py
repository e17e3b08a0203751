"""Keys turned from one position to another are those that the other position's own rotation gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import BLOCK, BLOCKS, DIM, HEADS, LAYERS, slots

import forebay

POSITIONS, SEED = 200, 11


def table(rotary: int, scale: float = 1.0) -> np.ndarray:
    """Cosines, then sines, of each pair."""
    angle = np.arange(POSITIONS)[:, None] * 100.0 ** -(np.arange(rotary // 2) / (rotary // 2))
    return (scale * np.concatenate([np.cos(angle), np.sin(angle)], 1)).astype(np.float32)


def rotated(keys: np.ndarray, positions: np.ndarray, rotary: int, neox: bool) -> np.ndarray:
    """`[token, head, element]` rotated for its position, in double precision."""
    angle = positions[:, None] * 100.0 ** -(np.arange(rotary // 2) / (rotary // 2))
    cosine, sine = np.cos(angle)[:, None], np.sin(angle)[:, None]
    made = keys.copy()
    first = np.arange(rotary // 2) * (1 if neox else 2)
    second = first + (rotary // 2 if neox else 1)
    x, y = keys[..., first], keys[..., second]
    made[..., first], made[..., second] = x * cosine - y * sine, y * cosine + x * sine
    return made


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary", [DIM, DIM // 2])
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_turned_keys_are_those_of_the_new_position(eng: forebay.Engine, neox: bool, rotary: int, scale: float) -> None:
    plain = np.random.default_rng(SEED).normal(size=(40, HEADS, DIM))
    old, new = np.arange(5, 45), np.arange(40)[::-1] * 3 + 20
    at = np.array(slots(40))
    kv = [np.full((2, BLOCKS, BLOCK, HEADS, DIM), 7, np.float32) for _ in range(LAYERS)]
    before = rotated(plain, old, rotary, neox)
    for layer in kv:
        layer[0].reshape(-1, HEADS, DIM)[at] = before
    eng.turn_keys(kv, at, old, new, table(rotary, scale), dtype="float32", neox=neox, layers=[0, 2])
    wanted = rotated(plain, new, rotary, neox)
    assert np.abs(wanted - before).max() > 1, "the two positions must differ"
    for number, layer in enumerate(kv):
        keys = layer[0].reshape(-1, HEADS, DIM)
        assert np.abs(keys[at] - (before if number == 1 else wanted)).max() < 2e-5
        assert (layer[1] == 7).all() and (np.delete(keys, at, 0) == 7).all(), "nothing else may change"


def test_long_segments_are_turned_token_by_token_whatever_their_slots(eng: forebay.Engine) -> None:
    source, count, blocks = np.random.default_rng(SEED), 700, 160
    old, new = source.integers(0, POSITIONS, count), source.integers(0, POSITIONS, count)
    new[::9] = old[::9]
    # Slots here and there, a run of them, and tokens without one.
    at = source.permutation(1000)[:count]
    at[200:330] = np.arange(1000, 1130)
    at[source.integers(0, count, 80)] = -1
    kv = [source.normal(size=(2, blocks, BLOCK, HEADS, DIM)).astype(np.float32) for _ in range(LAYERS)]
    one_by_one = [layer.copy() for layer in kv]
    eng.turn_keys(kv, at, old, new, table(DIM), dtype="float32")
    for token in np.flatnonzero(at >= 0):
        eng.turn_keys(one_by_one, at[[token]], old[[token]], new[[token]], table(DIM), dtype="float32")
    assert all((a == b).all() for a, b in zip(kv, one_by_one, strict=True))
    assert all((a[1] == b[1]).all() for a, b in zip(kv, one_by_one, strict=True))


class DlPack:
    """Memory that only DLPack describes."""

    def __init__(self, of: np.ndarray) -> None:
        self.__dlpack__, self.__dlpack_device__ = of.__dlpack__, of.__dlpack_device__


class Interface:
    """Memory that only the array interface describes."""

    def __init__(self, of: np.ndarray) -> None:
        self.of, self.__array_interface__ = of, of.__array_interface__


@pytest.mark.parametrize("wrap", [DlPack, Interface])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_a_table_may_be_described_in_other_ways(eng: forebay.Engine, wrap: Any, kind: Any) -> None:
    first = [np.random.default_rng(SEED).normal(size=(2, BLOCKS, BLOCK, HEADS, DIM)).astype(np.float32) for _ in range(LAYERS)]
    other = [layer.copy() for layer in first]
    given = table(DIM).astype(kind)
    eng.turn_keys(first, [0, 1], [3, 4], [9, 5], given, dtype="float32")
    eng.turn_keys(other, [0, 1], [3, 4], [9, 5], wrap(given), dtype="float32")
    assert all((a == b).all() for a, b in zip(first, other, strict=True))


def test_equal_positions_keep_every_bit_and_skipped_tokens_are_left(eng: forebay.Engine) -> None:
    kv = [np.random.default_rng(SEED).normal(size=(2, BLOCKS, BLOCK, HEADS, DIM)).astype(np.float32) for _ in range(LAYERS)]
    before = [layer.copy() for layer in kv]
    eng.turn_keys(kv, [0, -1, 2], [3, 0, 5], [3, 9, 5], table(DIM), dtype="float32")
    assert all((a == b).all() for a, b in zip(kv, before, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new": [3, POSITIONS, 5]}, f"position {POSITIONS} of token 1"),
        ({"new": [3, 5]}, "2 positions for 3 tokens"),
        ({"slots": [0, 1, BLOCK * BLOCKS]}, f"slot {BLOCK * BLOCKS}"),
        ({"layers": [LAYERS]}, f"layer {LAYERS}"),
        ({"dtype": "float64"}, "float64"),
        ({"table": np.zeros(8, np.float32)}, "rotary table of shape"),
        ({"table": (4096, [POSITIONS, DIM], None, 4, "cpu")}, "instead of a tuple"),
        ({"table": table(DIM * 2)}, "rotary elements"),
    ],
)
def test_what_does_not_fit_is_refused_and_turns_nothing(eng: forebay.Engine, change: dict[str, Any], message: str) -> None:
    kv = [np.ones((2, BLOCKS, BLOCK, HEADS, DIM), np.float32) for _ in range(LAYERS)]
    given = {"slots": [0, 1, 2], "new": [3, 4, 5], "layers": [0], "dtype": "float32", "table": table(DIM)} | change
    with pytest.raises(forebay.InvalidInput, match=message):
        eng.turn_keys(kv, given["slots"], [0, 1, 2], given["new"], given["table"], dtype=given["dtype"], layers=given["layers"])
    assert all((layer == 1).all() for layer in kv)
