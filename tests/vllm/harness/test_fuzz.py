"""Fuzzed servers: a fixed set of seeds, or those of FOREBAY_HARNESS_SEEDS."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .fuzz import Fuzz, Tally
from .server import Server, Shape

#: FIRST..END, without END.
CHOSEN = range(*map(int, os.environ.get("FOREBAY_HARNESS_SEEDS", "0..36").split("..")))


@pytest.mark.parametrize("seed", CHOSEN)
def test_every_request_ends_with_the_right_tokens(seed: int, tmp_path: Path, tally: Tally, device: str) -> None:
    fuzz = Fuzz(seed, tmp_path, tally, device)
    print(f"seed {seed}: {fuzz.shape}")
    fuzz.run()


def test_the_seeds_met_what_they_are_for(tally: Tally) -> None:
    tally.met_enough()
    assert tally.preemptions >= tally.seeds
    assert tally.aborted >= tally.seeds
    # Failed loads within a step are test_layerwise.py's: too few of these servers load so.
    assert min(tally.resets, tally.damaged, tally.killed) > 0
    assert {"flip", "truncate"} <= tally.kinds.keys()


def test_wrong_kv_is_noticed(tmp_path: Path, device: str) -> None:
    # The runner's own check: one bit of one block of one rank.
    server = Server(Shape(device=device), tmp_path)
    server.ask("a", list(range(10, 90)), 8)
    while "a" not in server.runner.sequences:
        server.step()
    rank, sequence = server.runner.ranks[1], server.runner.sequences["a"]
    rank.flip("model.layers.1.self_attn.attn", sequence.blocks[0][2])
    with pytest.raises(AssertionError, match=r"request a, rank 1, layer model.layers.1.self_attn.attn, position 3\d"):
        server.step()
    server.close()
