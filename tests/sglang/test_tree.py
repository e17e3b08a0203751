"""HiCache through SGLang's real tree and controller, with SGLang's own failures and delays: what comes back is what was stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from linked import PATIENCE_S, prompt
from test_controller import flip_bits
from tree import served


KINDS = ["mha", "mla", "dsa", "hybrid"]


def is_prefix(whole: list[bytes], some: list[bytes]) -> bool:
    """Whether these are the first pages of a prompt, buffer by buffer."""
    return all(part == all_of[: len(part)] for part, all_of in zip(some, whole, strict=True))


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_goes_through_host_memory_to_the_drive_and_back_after_a_restart(cache: Path, kind: str) -> None:
    with served(cache, kind) as tree:
        stored = tree.compute(prompt(5), seed=1)
    with served(cache, kind) as tree:
        assert tree.fetch(prompt(5, 9)) == tree.fetch([]) == [b""] * len(stored)
        assert tree.fetch([*prompt(5), *prompt(1, 9)]) == stored


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_damage_is_computed_and_never_read_wrong(cache: Path, kind: str, seed: int) -> None:
    with served(cache, kind) as tree:
        stored = tree.compute(prompt(6), seed=1)
    flip_bits(cache, 2, seed)
    with served(cache, kind) as tree:
        came = tree.fetch(prompt(6))
        assert len(came[0]) < len(stored[0]) and is_prefix(stored, came)


def rank(cache: str, number: int) -> None:
    """One of two tensor-parallel ranks, which agree over gloo."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{cache}-ranks", rank=number, world_size=2)
    for kind in ("mla", "dsa"):
        given = {"group": torch.distributed.group.WORLD, "rank": number, "size": 2}
        with served(Path(cache), kind, **given) as tree:
            # The ranks hold the same latent KV, and one of them stores it.
            stored = tree.compute(prompt(5), seed=1)
            store = tree.tree.cache_controller.storage_backend._store
            assert bool(store.stats()["put"]["ok"]) is (number == 0)
            torch.distributed.barrier()
        with served(Path(cache), kind, **given) as tree:
            assert tree.fetch(prompt(5, 9)) == [b""] * len(stored)
            assert tree.fetch([*prompt(5), *prompt(1, 9)]) == stored
            torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_latent_kv_that_one_rank_stores_comes_back_on_both(cache: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank, args=(str(cache), number)) for number in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE_S)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
