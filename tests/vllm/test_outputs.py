"""Greedy outputs are the same with and without Forebay, wherever the KV came from; each test sees that tokens were loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import generate, prompts, settings


@pytest.mark.parametrize("separate", [False, True], ids=["one-process", "own-engine-process"])
def test_cold_warm_and_after_a_restart(model: str, plain: list[list[int]], tmp_path: Path, separate: bool) -> None:
    cache = settings(tmp_path / "cache")
    cold = generate(tmp_path, separate, model=model, prompts=prompts(), cache=cache, rounds=2)
    assert cold.tokens(0) == plain
    assert cold.tokens(1) == plain
    assert all(cached >= 384 for cached in cold.cached(1)), "the second round must come from the cache"
    restarted = generate(tmp_path, separate, model=model, prompts=prompts(), cache=cache)
    assert restarted.tokens() == plain
    assert all(cached >= 384 for cached in restarted.cached())
    assert restarted.loaded >= 384


def test_chunked_prefill(model: str, plain: list[list[int]], tmp_path: Path) -> None:
    cache = settings(tmp_path / "cache")
    engine = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    run = generate(tmp_path, model=model, prompts=prompts(), cache=cache, rounds=2, engine=engine)
    assert run.tokens(0) == plain
    assert run.tokens(1) == plain
    assert all(cached >= 384 for cached in run.cached(1))


def test_preemption(model: str, tmp_path: Path) -> None:
    # Six requests of four to five blocks that grow while 18 blocks are there: some are preempted and resumed.
    asked = {"model": model, "prompts": prompts(6), "max_tokens": 200, "engine": {"num_gpu_blocks_override": 18}}
    bare = generate(tmp_path, **asked)
    run = generate(tmp_path, **asked, cache=settings(tmp_path / "cache"), rounds=2)
    assert run.metrics.get("vllm:num_preemptions", 0) > 0, "the test must preempt"
    assert run.tokens(0) == bare.tokens()
    assert run.tokens(1) == bare.tokens()
    assert run.loaded > 0


def test_bfloat16(models: Callable[[str], str], tmp_path: Path) -> None:
    asked = {"model": models("bfloat16"), "prompts": prompts(1), "dtype": "bfloat16"}
    bare = generate(tmp_path, **asked)
    run = generate(tmp_path, **asked, cache=settings(tmp_path / "cache"), rounds=2)
    assert run.tokens(0) == bare.tokens()
    assert run.tokens(1) == bare.tokens()
    assert run.cached(1)[0] >= 384


def test_a_producer_loads_nothing_and_a_consumer_stores_nothing(
    model: str, plain: list[list[int]], tmp_path: Path
) -> None:
    cache = settings(tmp_path / "cache")
    consumer = generate(tmp_path, model=model, prompts=prompts(), cache=cache, rounds=2, role="kv_consumer")
    assert (consumer.tokens(1), consumer.loaded) == (plain, 0)
    producer = generate(tmp_path, model=model, prompts=prompts(), cache=cache, rounds=2, role="kv_producer")
    assert (producer.tokens(1), producer.loaded) == (plain, 0)
    consumer = generate(tmp_path, model=model, prompts=prompts(), cache=cache, role="kv_consumer")
    assert consumer.tokens() == plain
    assert consumer.loaded >= 384


def test_another_salt_shares_nothing(model: str, tmp_path: Path) -> None:
    # The same tokens under another fingerprint of the user's are another namespace.
    asked = {"model": model, "prompts": prompts(1)}
    generate(tmp_path, **asked, cache=settings(tmp_path / "cache"))
    other = generate(tmp_path, **asked, cache=settings(tmp_path / "cache", fingerprint="other weights"))
    assert other.loaded == 0
