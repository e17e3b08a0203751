"""Fuzzed servers with sliding windows: vLLM takes blocks that have left a window back while their request runs, and gives them to
another one in the same step; a block is poisoned the moment it is given out."""

from __future__ import annotations

from pathlib import Path

import pytest

from .fuzz import Fuzz, Tally
from .server import Server, Shape
from .test_fuzz import CHOSEN

#: Windows that are no multiple of a block, shorter than a chunk, longer than a chunk; and a model of window layers alone.
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None, 40), (None, 16, 100), (24, None), (50,))


@pytest.mark.parametrize("seed", CHOSEN)
def test_every_request_ends_with_the_right_tokens(seed: int, tmp_path: Path, tally: Tally, device: str) -> None:
    fuzz = Fuzz(seed, tmp_path, tally, device, WINDOWS[seed % len(WINDOWS)])
    print(f"seed {seed}: {fuzz.shape}")
    fuzz.run()


def test_the_seeds_met_what_they_are_for(tally: Tally) -> None:
    tally.met_enough()
    assert min(tally.aborted, tally.preemptions, tally.resets, tally.damaged, tally.killed) > 0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["step-by-step", "ahead"])
def test_a_long_prompt_is_whole_again_after_a_restart(tmp_path: Path, device: str, asynchronous: bool) -> None:
    # Steps of 24 tokens end inside blocks and chunks; the pool is far smaller than what the window has left behind.
    # On a busy machine a copy may take longer than a server would wait; then the chunk is given up, which this test is not about.
    shape = Shape(
        asynchronous=asynchronous,
        windows=(None, 40),
        batch_tokens=64,
        long_prefill_tokens=24,
        blocks=48,
        device=device,
        settings={"gather_patience_ms": 20_000, "load_timeout_ms": 20_000, "max_held_blocks": 1000},
    )
    prompt, tokens = [4 + i * 7 % 500 for i in range(500)], 0
    for _ in range(2):
        server = Server(shape, tmp_path)
        server.ask("a", prompt, 8)
        server.drain()
        server.check_outputs()
        server.check_empty()
        tokens = server.loaded_tokens
        stats = server.scheduler.connector._scheduler.stats()
        assert stats["scheduler_skipped_window_tokens"] == 0
        workers = [rank.connector._worker.stats() for rank in server.runner.ranks]
        assert [(w["shed_chunks"], w["given_up"], w["failed_loads"]) for w in workers] == [(0, 0, 0)] * len(workers)
        server.close()
    # Chunks of 32: 480 tokens are whole chunks, and the last token of the prompt is not among them.
    assert tokens == 480
