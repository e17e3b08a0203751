"""Memory, drive and remote store together: the same answers wherever the KV came from, and after the loss of each in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import SHORT, generate, settings

#: Whole chunks of the shortest prompt.
WHOLE = 384


@pytest.mark.ci
def test_the_remote_store_and_the_drive_may_go_while_vllm_serves(model: str, plain: list[list[int]], tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    remote.mkdir()
    tiers = {"remote_url": f"file://{remote}", "local_cpu": True, "max_local_cpu_size": "64MiB", "load_timeout_ms": 60_000}
    first = generate(tmp_path, SHORT, SHORT, model=model, cache=settings(tmp_path / "a", **tiers))
    assert [first.tokens(number) for number in range(2)] == [plain] * 2
    assert first.metrics.get("vllm:forebay_memory_hits", 0) > 0

    # Another machine finds all of it in the store, and goes on when first the store and then the
    # drive is emptied.
    drive = tmp_path / "b"
    rounds = (SHORT, SHORT | {"lost": [str(remote)]}, SHORT | {"lost": [str(remote), str(drive)]}, SHORT)
    second = generate(tmp_path, *rounds, model=model, cache=settings(drive, **tiers))
    assert [second.tokens(number) for number in range(4)] == [plain] * 4
    assert second.reasons() == {"length"}
    assert all(cached >= WHOLE for number in range(2) for cached in second.cached(number)), "from the store, then without it"


@pytest.mark.parametrize("memory", [False, True], ids=["drive", "memory"])
def test_a_remote_store_that_is_gone_from_the_start_changes_nothing(
    model: str, plain: list[list[int]], tmp_path: Path, memory: bool
) -> None:
    gone = tmp_path / "file"
    gone.write_text("no directory")
    cache = settings(tmp_path / "cache", remote_url=f"file://{gone}/store", local_cpu=memory, load_timeout_ms=60_000)
    run = generate(tmp_path, SHORT, SHORT, model=model, cache=cache)
    assert (run.tokens(0), run.tokens(1)) == (plain, plain)
    assert run.loaded_in(1) >= WHOLE
