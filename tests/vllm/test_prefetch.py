"""A queue in front of real vLLM: what is stored of requests that wait is in memory when they begin."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import LONG, Filled, Run, generate, settings

#: Requests of three stored chunks each; vLLM has room for one of them at a time.
REQUESTS, CHUNKS = len(LONG["prompts"]), 3
ONE_AT_A_TIME = {"enable_prefix_caching": False, "max_model_len": 768, "num_gpu_blocks_override": 7}


@pytest.mark.ci
def test_waiting_requests_are_in_memory_when_they_begin(bare: Run, filled: Filled, model: str, tmp_path: Path) -> None:
    cache = settings(filled.copy(tmp_path), local_cpu=True, max_local_cpu_size="256MiB", load_timeout_ms=60_000)
    run = generate(tmp_path, LONG | {"max_tokens": 8}, model=model, cache=cache, engine=ONE_AT_A_TIME)
    assert run.tokens() == [tokens[:8] for tokens in bare.tokens(1)]
    counts = {name: run.metrics.get(f"vllm:forebay_{name}", 0) for name in (
        "memory_hits", "memory_misses", "prefetched_chunks", "prefetch_used_chunks", "prefetch_wasted_chunks", "scheduler_prefetches"
    )}
    print(counts)
    # The first one waits for nobody.
    waited = (REQUESTS - 1) * CHUNKS
    assert counts["memory_hits"] + counts["memory_misses"] == REQUESTS * CHUNKS
    assert counts["memory_hits"] >= 0.8 * waited, counts
    assert counts["scheduler_prefetches"] == REQUESTS - 1 and counts["prefetched_chunks"] > 0, counts
    assert counts["prefetch_wasted_chunks"] <= 0.1 * counts["prefetched_chunks"], counts
