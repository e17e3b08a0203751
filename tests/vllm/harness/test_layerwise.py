"""Fuzzed servers that load layer by layer while a step computes: nobody reports the end of such a load, and what it brings may fail in the
step that computes from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from .fuzz import Fuzz, Tally
from .test_fuzz import CHOSEN


@pytest.fixture(scope="module")
def tally() -> Tally:
    """Of all seeds of this run."""
    return Tally()


@pytest.mark.parametrize("seed", CHOSEN)
def test_every_request_ends_with_the_right_tokens(seed: int, tmp_path: Path, tally: Tally, device: str) -> None:
    fuzz = Fuzz(seed, tmp_path, tally, device, layerwise=True)
    print(f"seed {seed}: {fuzz.shape}")
    fuzz.run()


def test_the_seeds_met_what_they_are_for(tally: Tally) -> None:
    print(tally)
    if tally.seeds < 30:
        pytest.skip("too few seeds in this run")
    assert tally.seeds_that_loaded >= tally.seeds * 0.5
    assert tally.loaded_tokens >= 100 * tally.seeds
    # A load within a step fails as blocks, not as a request: what was computed from them is excused.
    assert tally.excused >= tally.seeds * 0.5
    assert min(tally.aborted, tally.preemptions, tally.damaged, tally.killed) > 0
