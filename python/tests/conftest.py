"""What the tests share: a small geometry, tensors of every layout, and a cache directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forebay

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 3, 2, 16, 8, 12
CHUNK = 32


def config(path: Path, **more: Any) -> dict[str, Any]:
    """Settings of a small cache on whatever file system the tests are on."""
    gds = {"cache_dir": path}
    small = {"capacity": "256MiB", "min_free": 0, "staging": "4MiB", "store_staging": "4MiB"}
    return {
        "backend": "gds",
        "gds_config": gds,
        "chunk_size": CHUNK,
        "allow_any_filesystem": True,
        "on_open_failure": "fail",
        "hugepages": False,
        **small,
        **more,
    }


def geometry(**more: Any) -> forebay.Geometry:
    """Float32 K and V in every layer."""
    values: dict[str, Any] = dict(
        model="m", layers=LAYERS, kv_heads=HEADS, head_size=DIM, dtype="float32", planes=2, fingerprint="test"
    )
    return forebay.Geometry(**{**values, **more})


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A fresh cache directory."""
    return tmp_path / "cache"


@pytest.fixture
def eng(cache: Path) -> Any:
    """An engine in a fresh cache."""
    with forebay.Engine(config(cache), geometry(), device="cpu") as engine:
        assert engine.is_up, engine.why_disabled
        open_segment(engine, [np.zeros((2, BLOCKS, BLOCK, HEADS, DIM), np.float32) for _ in range(LAYERS)])
        yield engine


def open_segment(engine: forebay.Engine, kv: list[Any]) -> None:
    """Stores a prompt of its own, so that a segment is open: stores wait half a second for room, and a slow drive takes longer."""
    stores = (engine.store([1 << 31] * CHUNK, kv, slots(CHUNK), wait_for_staging=True) for _ in range(12))
    assert any(store.wait().stored for store in stores)


def slots(tokens: int, block: int = BLOCK, blocks: int = BLOCKS) -> list[int]:
    """Slots of `tokens` tokens in blocks that are neither in order nor adjacent."""
    order = [(5 * i + 3) % blocks for i in range(blocks)]
    return [order[t // block] * block + t % block for t in range(tokens)]
