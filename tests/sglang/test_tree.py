"""HiCache through SGLang's real tree and controller, with SGLang's own failures and delays: what comes back is what was stored."""

from __future__ import annotations

from pathlib import Path

import pytest
from linked import prompt
from test_controller import flip_bits
from tree import served


def is_prefix(whole: list[bytes], some: list[bytes]) -> bool:
    """Whether these are the first pages of a prompt, buffer by buffer."""
    return all(part == all_of[: len(part)] for part, all_of in zip(some, whole, strict=True))


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["mha", "dsa"])
def test_a_prompt_goes_through_host_memory_to_the_drive_and_back_after_a_restart(cache: Path, kind: str) -> None:
    with served(cache, kind) as tree:
        stored = tree.compute(prompt(5), seed=1)
    with served(cache, kind) as tree:
        assert tree.fetch(prompt(5, 9)) == tree.fetch([]) == [b""] * len(stored)
        assert tree.fetch([*prompt(5), *prompt(1, 9)]) == stored


@pytest.mark.parametrize("kind", ["mha", "dsa"])
def test_random_failures_and_delays_never_give_a_wrong_byte(cache: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.2")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.01")
    read = 0
    with served(cache, kind) as tree:
        stored = {salt: tree.compute(prompt(3, salt), seed=salt) for salt in range(1, 5)}
    for _ in range(3):
        with served(cache, kind) as tree:
            for salt, whole in stored.items():
                came = tree.fetch(prompt(3, salt))
                read += len(came[0])
                assert is_prefix(whole, came)
    assert read


@pytest.mark.parametrize("kind", ["mha", "dsa"])
@pytest.mark.parametrize("seed", range(3))
def test_damage_is_computed_and_never_read_wrong(cache: Path, kind: str, seed: int) -> None:
    with served(cache, kind) as tree:
        stored = tree.compute(prompt(6), seed=1)
    flip_bits(cache, 2, seed)
    with served(cache, kind) as tree:
        came = tree.fetch(prompt(6))
        assert len(came[0]) < len(stored[0]) and is_prefix(stored, came)
