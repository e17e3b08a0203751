"""Greedy outputs are the same with and without Forebay, wherever the KV came from; each test sees that tokens were loaded.

Tests with the mark `ci` are the share that `make test` runs; they look at few processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SHORT, Filled, Run, generate, prompts, settings

FOREBAY = Path(sys.executable).with_name("forebay")
#: Whole chunks of the shortest prompt, which ends in the middle of one.
WHOLE = 384


@pytest.mark.ci
def test_cold_warm_and_in_pieces(plain: list[list[int]], filled: Filled) -> None:
    assert filled.run.tokens(0) == plain
    assert filled.run.loaded_in(0) == 0
    assert filled.run.tokens(1) == plain
    assert all(cached >= WHOLE for cached in filled.run.cached(1)), "the second round must come from the cache"
    assert filled.run.loaded_in(1) >= WHOLE


@pytest.mark.ci
def test_preemption(bare: Run, filled: Filled) -> None:
    assert filled.run.metrics.get("vllm:num_preemptions", 0) > 0, "the test must preempt"
    assert filled.run.tokens(2) == bare.tokens(1)
    assert filled.run.tokens(3) == bare.tokens(1)
    assert filled.run.loaded_in(3) > 0


@pytest.mark.ci
def test_a_cache_salt_shares_with_nobody_else(plain: list[list[int]], filled: Filled) -> None:
    assert [filled.run.tokens(number) for number in (4, 5, 6)] == [plain] * 3
    assert [filled.run.loaded_in(number) > 0 for number in (4, 5, 6)] == [False, True, False]
    assert all(cached >= WHOLE for cached in filled.run.cached(5))


def test_stored_when_requests_have_ended(model: str, plain: list[list[int]], tmp_path: Path) -> None:
    cache = settings(tmp_path / "cache", store_when="finished", max_held_blocks=1000)
    # In pieces; the engine in a process of its own takes a last step for requests that have ended,
    # which stores the last one.
    engine = {"max_num_batched_tokens": 128, "enable_chunked_prefill": True}
    for loaded in (False, True):
        run = generate(tmp_path, SHORT, model=model, cache=cache, engine=engine, separate=True)
        assert run.tokens() == plain
        assert [cached >= WHOLE for cached in run.cached()] == [loaded] * len(plain), run.cached()
        assert (run.loaded > 0) == loaded


def test_after_a_restart_and_with_the_engine_in_a_process_of_its_own(
    model: str, plain: list[list[int]], filled: Filled, tmp_path: Path
) -> None:
    run = generate(tmp_path, SHORT, model=model, cache=settings(filled.copy(tmp_path)), separate=True)
    assert run.tokens() == plain
    assert all(cached >= WHOLE for cached in run.cached())
    assert run.loaded >= WHOLE


def test_bfloat16(models: Callable[[str], str], tmp_path: Path) -> None:
    one = {"prompts": prompts(1)}
    asked = {"model": models("bfloat16"), "dtype": "bfloat16"}
    bare = generate(tmp_path, one, **asked)
    for codec in ("none", "exp4"):
        cache = tmp_path / codec
        run = generate(tmp_path, one, one, **asked, cache=settings(cache, codec=codec))
        assert run.tokens(0) == bare.tokens()
        assert run.tokens(1) == bare.tokens()
        assert run.cached(1)[0] >= WHOLE
        stat = subprocess.run([FOREBAY, "stat", "--json", cache], check=True, capture_output=True, text=True)
        (drive,) = json.loads(stat.stdout)["drives"]
        lanes = [lane for namespace in drive["namespaces"] for shard in namespace["shards"] for lane in shard["lanes"]]
        live, stored = (sum(lane[of] for lane in lanes) for of in ("live_bytes", "slot_bytes"))
        print(f"codec {codec}: {live} bytes of KV in {stored}")
        # Extents of 64 KiB become 52, and a slot has a header of 4.
        assert (live > 1.2 * stored) == (codec == "exp4"), (live, stored)


def test_within_steps(model: str, plain: list[list[int]], filled: Filled, tmp_path: Path) -> None:
    # Layer by layer, which vLLM can recover from with one KV cache group, without asynchronous
    # scheduling and without prefix caching.
    cache = settings(filled.copy(tmp_path), use_layerwise=True)
    careful = {"async_scheduling": False, "enable_prefix_caching": False}
    run = generate(tmp_path, SHORT, SHORT, model=model, cache=cache, engine=careful)
    assert (run.tokens(0), run.tokens(1)) == (plain, plain)
    assert run.loaded_in(0) >= WHOLE


def test_within_steps_that_are_scheduled_ahead(model: str, plain: list[list[int]], filled: Filled, tmp_path: Path) -> None:
    # As users run vLLM; its default policy is that a request whose load fails ends with an error.
    cache = settings(filled.copy(tmp_path), use_layerwise=True, max_sync_stall_ms=60_000, load_timeout_ms=60_000)
    ahead = {"async_scheduling": True, "enable_prefix_caching": True}
    run = generate(tmp_path, SHORT, SHORT, model=model, cache=cache, engine=ahead)
    assert (run.tokens(0), run.tokens(1)) == (plain, plain)
    assert run.loaded_in(0) >= WHOLE


def test_a_producer_loads_nothing(model: str, plain: list[list[int]], filled: Filled, tmp_path: Path) -> None:
    fresh = {"prompts": prompts(1, seed=99)}
    cache = settings(filled.copy(tmp_path))
    run = generate(tmp_path, SHORT, fresh, model=model, cache=cache, role="kv_producer")
    assert run.tokens() == plain
    assert (run.loaded_in(0), run.loaded_in(1)) == (0, 0)
    assert run.metrics.get("vllm:forebay_stored_chunks", 0) == WHOLE / 128, "only the prompt that was not there"


def test_a_consumer_stores_nothing(model: str, plain: list[list[int]], filled: Filled, tmp_path: Path) -> None:
    fresh = {"prompts": prompts(1, seed=99)}
    cache = settings(filled.copy(tmp_path))
    run = generate(tmp_path, SHORT, fresh, fresh, model=model, cache=cache, role="kv_consumer")
    assert run.tokens() == plain
    assert run.loaded_in(0) >= WHOLE
    assert (run.loaded_in(1), run.loaded_in(2), run.cached(2)) == (0, 0, [0])


def test_another_fingerprint_shares_nothing(model: str, plain: list[list[int]], filled: Filled, tmp_path: Path) -> None:
    cache = settings(filled.copy(tmp_path), fingerprint="other weights")
    run = generate(tmp_path, SHORT, SHORT, model=model, cache=cache)
    assert (run.tokens(0), run.tokens(1)) == (plain, plain)
    assert (run.loaded_in(0), run.loaded_in(1) >= WHOLE) == (0, True)
