"""Models that mix layers of full attention with layers of a sliding window: several KV cache groups, whose window blocks vLLM takes
back while a request runs, and on a hit only the last window's blocks are there to be loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import generate, prompts, settings
from model import WINDOW
from test_damage import flip_bits, truncate

#: Smaller than the window, so that a window is several blocks.
BLOCK = 32
#: Tokens of these prompts that are loaded at least, many windows long.
LOADED = 384


def engine(hybrid: bool = True, **more: Any) -> dict[str, Any]:
    """Arguments of `LLM`: with the hybrid KV cache manager window layers have groups of their own, without it they keep all."""
    return {"block_size": BLOCK, "disable_hybrid_kv_cache_manager": not hybrid} | more


@pytest.fixture(scope="module")
def gemma(models: Callable[..., str]) -> str:
    """The tiny Gemma in float32."""
    return models("float32", "gemma")


@pytest.fixture(scope="module")
def bare(gemma: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM generates for `prompts()` without a connector."""
    return generate(tmp_path_factory.mktemp("bare"), model=gemma, prompts=prompts(), engine=engine()).tokens()


@pytest.fixture(scope="module")
def filled(gemma: str, bare: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds `prompts()`."""
    folder = tmp_path_factory.mktemp("filled")
    run = generate(
        folder, model=gemma, prompts=prompts(), cache=settings(folder / "cache", chunk_size=256), rounds=2, engine=engine()
    )
    assert run.tokens(0) == bare
    assert run.tokens(1) == bare
    assert all(cached >= LOADED for cached in run.cached(1)), "the second round must come from the cache"
    assert f"chunk_size is {WINDOW} instead of 256" in run.log
    return folder / "cache"


def test_cold_warm_and_after_a_restart(gemma: str, bare: list[list[int]], filled: Path, tmp_path: Path) -> None:
    cache = settings(filled, chunk_size=256)
    restarted = generate(tmp_path, model=gemma, prompts=prompts(), cache=cache, engine=engine())
    assert restarted.tokens() == bare
    assert all(cached >= LOADED for cached in restarted.cached())
    assert restarted.loaded >= LOADED


def test_window_blocks_are_gathered_before_vllm_reuses_them(gemma: str, bare: list[list[int]], tmp_path: Path) -> None:
    # Steps that end inside blocks and chunks, and a pool so small that what leaves a window is
    # another request's at once.
    cache = settings(tmp_path / "cache", chunk_size=256)
    small = engine(max_num_batched_tokens=100, enable_chunked_prefill=True, num_gpu_blocks_override=100)
    run = generate(tmp_path, model=gemma, prompts=prompts(), cache=cache, engine=small)
    assert run.tokens() == bare
    assert run.metrics.get("vllm:forebay_scheduler_skipped_window_tokens", 0) == 0
    # Another process, so that nothing but the drive can have it.
    restarted = generate(tmp_path, model=gemma, prompts=prompts(), cache=cache, engine=engine())
    assert restarted.tokens() == bare
    assert all(cached >= LOADED for cached in restarted.cached())


def test_generated_tokens_beyond_the_window(gemma: str, tmp_path: Path) -> None:
    asked = {"model": gemma, "prompts": prompts(1), "max_tokens": 3 * WINDOW, "engine": engine()}
    plain = generate(tmp_path, **asked).tokens()[0]
    cache = settings(tmp_path / "cache", chunk_size=256, save_decode_cache=True)
    assert generate(tmp_path, **asked, cache=cache).tokens() == [plain]
    # A conversation that goes on: its beginning was generated, not given.
    longer = [prompts(1)[0] + plain + [5, 6, 7]]
    after = generate(tmp_path, model=gemma, prompts=longer, engine=engine()).tokens()
    run = generate(tmp_path, model=gemma, prompts=longer, cache=cache, engine=engine())
    assert run.tokens() == after
    assert run.loaded >= len(prompts(1)[0]) + 2 * WINDOW - BLOCK


@pytest.mark.parametrize("damage", [flip_bits, truncate], ids=lambda d: d.__name__)
def test_damage_changes_no_output(
    gemma: str, bare: list[list[int]], filled: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(filled, tmp_path / "cache")
    damage(tmp_path / "cache")
    cache = settings(tmp_path / "cache", chunk_size=256)
    run = generate(tmp_path, model=gemma, prompts=prompts(), cache=cache, rounds=2, engine=engine())
    assert run.tokens(0) == bare
    assert run.tokens(1) == bare
    assert all(output["reason"] == "length" for outputs in run.rounds for output in outputs)


def test_loaded_kv_of_windows_is_used(gemma: str, bare: list[list[int]], tmp_path: Path) -> None:
    # Zeroed before it is stored: wrong content under valid checksums.
    asked = {"model": gemma, "prompts": prompts(), "cache": settings(tmp_path / "cache"), "engine": engine()}
    generate(tmp_path, **asked, zero_stored=True)
    run = generate(tmp_path, **asked)
    assert run.loaded >= LOADED
    assert run.tokens() != bare, "loaded KV was not used"


def test_without_the_hybrid_manager_all_blocks_are_kept(gemma: str, bare: list[list[int]], tmp_path: Path) -> None:
    asked = {"model": gemma, "prompts": prompts(), "engine": engine(hybrid=False)}
    cache = settings(tmp_path / "cache", chunk_size=256)
    run = generate(tmp_path, **asked, cache=cache, rounds=2)
    assert run.tokens(0) == bare
    assert run.tokens(1) == bare
    assert all(cached >= 256 for cached in run.cached(1))
    assert "chunk_size is" not in run.log, "one group of full attention"
