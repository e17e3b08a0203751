"""Ranks of pipeline parallelism and of decode context parallelism, and ranks whose caches the scheduler cannot see: what can be loaded is the
least that any of them has."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from . import damage
from .fuzz import Fuzz, Tally
from .server import Server, Shape
from .test_fuzz import CHOSEN

PROMPT = [4 + i * 11 % 500 for i in range(300)]
#: Copies and loads are not given up, however busy this machine is.
PATIENT = {"max_held_blocks": 1000, "gather_patience_ms": 20_000, "load_timeout_ms": 20_000}
#: Fields of `Shape`, by name: two stages, three stages that are elsewhere, interleaved tokens of two and of four ranks, MLA on two machines.
RANKS: dict[str, dict[str, Any]] = {
    "stages": {"ranks": 2, "stages": 2},
    "stages-elsewhere": {"ranks": 1, "stages": 3, "elsewhere": (1, 2)},
    "context": {"ranks": 2, "context": 2},
    "context-interleaved": {"ranks": 4, "context": 4, "interleave": 8},
    "elsewhere": {"ranks": 3, "elsewhere": (2,)},
    "all-elsewhere": {"ranks": 2, "elsewhere": (0, 1)},
    "mla-elsewhere": {"ranks": 4, "mla": True, "elsewhere": (2, 3)},
    "mla-context-stages": {"ranks": 4, "mla": True, "context": 2, "stages": 2},
}


def finish(server: Server) -> None:
    """To the end, and everything is right."""
    server.drain()
    server.check_outputs()
    server.check_empty()


def run(shape: Shape, folder: Path) -> tuple[int, int]:
    """Tokens that a server loads for one prompt, and loads that fail; then the prompt is stored."""
    server = Server(shape, folder)
    server.ask("a", PROMPT, 8)
    finish(server)
    answered = server.loaded_tokens, server.failed_loads
    server.until_stored(PROMPT, whole(shape))
    server.close()
    return answered


def whole(shape: Shape) -> int:
    """Tokens of the prompt in whole chunks."""
    chunk = max(32, shape.block_tokens)
    return len(PROMPT) // chunk * chunk


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["step-by-step", "ahead"])
def test_all_ranks_load_what_they_stored(tmp_path: Path, device: str, name: str, asynchronous: bool) -> None:
    shape = Shape(asynchronous=asynchronous, second_runner=asynchronous, device=device, settings=PATIENT, **RANKS[name])
    assert run(shape, tmp_path) == (0, 0)
    assert run(shape, tmp_path) == (whole(shape), 0)


@pytest.mark.parametrize("name", RANKS)
def test_one_rank_without_kv_means_that_nothing_is_loaded(tmp_path: Path, device: str, name: str) -> None:
    shape = Shape(device=device, settings=PATIENT, **RANKS[name])
    run(shape, tmp_path)
    last = shape.workers - 1
    assert damage.remove_rank(shape.cache(tmp_path, last), last, random.Random(1))
    assert run(shape, tmp_path) == (0, 0)
    # What was missing there was stored again; nothing else was.
    assert run(shape, tmp_path) == (whole(shape), 0)


@pytest.mark.parametrize("pieces", ["outer", "inner"])
@pytest.mark.parametrize("more", [{}, {"windows": (None, 40)}, {"ranks": 2, "context": 2}], ids=["plain", "windows", "context"])
def test_blocks_in_pieces_are_moved_whole(tmp_path: Path, device: str, pieces: str, more: dict[str, Any]) -> None:
    shape = Shape(pieces=pieces, device=device, settings=PATIENT, **more)
    assert run(shape, tmp_path) == (0, 0)
    assert run(shape, tmp_path) == (whole(shape), 0)


def test_a_stage_that_is_not_told_that_a_step_is_computed_stores_before_the_next(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With speculative decoding vLLM's first runner finishes a step where drafts are made: on the last stage alone."""
    shape = Shape(ranks=1, stages=2, device=device, settings=PATIENT)
    server = Server(shape, tmp_path)
    monkeypatch.setattr(server.runner.ranks[0].connector, "wait_for_save", lambda: None)
    server.ask("a", PROMPT, 8)
    finish(server)
    server.until_stored(PROMPT, whole(shape))
    server.close()
    assert run(shape, tmp_path) == (whole(shape), 0)


def test_stages_of_other_layers_share_nothing(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.vllm import identity

    shape = Shape(ranks=1, stages=2, device=device, settings=PATIENT)
    run(shape, tmp_path)
    monkeypatch.setattr(identity, "stages", lambda config: [(0, 2), (2, 3)])
    assert run(shape, tmp_path) == (0, 0)


def test_a_rank_that_is_elsewhere_is_asked_only_for_what_is_stored_here(tmp_path: Path, device: str) -> None:
    shape = Shape(ranks=2, elsewhere=(1,), device=device, settings=PATIENT)
    server = Server(shape, tmp_path)
    half = server.scheduler.connector._scheduler
    for name, count in (("a", 0), ("b", 1)):
        server.reset()
        before = half.stats()["scheduler_questions"], server.loaded_tokens
        server.ask(name, PROMPT, 4)
        finish(server)
        stats = half.stats()
        assert (stats["scheduler_unseen_ranks"], stats["scheduler_questions"] - before[0]) == (1, count)
        assert server.loaded_tokens - before[1] == count * whole(shape)
        server.until_stored(PROMPT, whole(shape))
    server.close()


@pytest.mark.parametrize("seed", CHOSEN)
def test_every_request_ends_with_the_right_tokens(seed: int, tmp_path: Path, tally: Tally, device: str) -> None:
    name = list(RANKS)[seed % len(RANKS)]
    windows = ((None,), (None, 40))[seed // len(RANKS) % 2] if "context" not in name else (None,)
    fuzz = Fuzz(seed, tmp_path, tally, device, windows if not RANKS[name].get("mla") else (None,), RANKS[name])
    print(f"seed {seed}, {name}: {fuzz.shape}")
    fuzz.run()


def test_the_seeds_met_what_they_are_for(tally: Tally) -> None:
    tally.met_enough()
    assert min(tally.aborted, tally.preemptions, tally.resets, tally.damaged, tally.killed) > 0
