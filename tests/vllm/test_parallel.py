"""Real vLLM with several workers: what all of them stored is loaded by all of them, and outputs are those of one worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import SHORT, generate, settings

#: Whole chunks of the shortest prompt, which ends in the middle of one.
WHOLE = 384


@pytest.mark.parametrize("engine", [{"tensor_parallel_size": 2}], ids=["tensors"])
def test_two_workers(model: str, plain: list[list[int]], tmp_path: Path, engine: dict[str, int]) -> None:
    asked = {"model": model, "cache": settings(tmp_path / "cache"), "engine": engine, "separate": True}
    (tmp_path / "cache").mkdir()
    cold = generate(tmp_path, SHORT, **asked)
    assert cold.tokens() == plain
    assert cold.loaded == 0
    warm = generate(tmp_path, SHORT, **asked)
    assert warm.tokens() == plain
    assert all(cached >= WHOLE for cached in warm.cached())
    assert warm.loaded >= WHOLE
    shards = {folder.name for folder in (tmp_path / "cache").glob("*/pp*of*")}
    assert len(shards) == 2, shards
