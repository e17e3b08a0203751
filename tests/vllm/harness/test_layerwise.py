"""Fuzzed servers that load layer by layer while a step computes: nobody reports the end of such a load, and what it brings may fail in the
step that computes from it. Then either vLLM computes it, which is sound one step after the other and without prefix caching, or it ends
the request with an error."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from . import damage
from .fuzz import Fuzz, Tally, failing, within_steps
from .server import Server, Shape
from .test_fuzz import CHOSEN


@pytest.mark.parametrize("seed", CHOSEN)
def test_every_request_ends_with_the_right_tokens(seed: int, tmp_path: Path, tally: Tally, device: str) -> None:
    fuzz = Fuzz(seed, tmp_path, tally, device, change=within_steps)
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


@pytest.fixture(scope="module")
def failures() -> Tally:
    """Of all seeds of this run whose requests may end with an error."""
    return Tally()


@pytest.mark.parametrize("seed", CHOSEN)
def test_every_request_ends_with_the_right_tokens_or_its_own_load_has_failed(
    seed: int, tmp_path: Path, failures: Tally, device: str
) -> None:
    fuzz = Fuzz(seed, tmp_path, failures, device, change=failing)
    print(f"seed {seed}: {fuzz.shape}")
    fuzz.run()


def test_the_seeds_met_failures(failures: Tally) -> None:
    print(failures)
    if failures.seeds < 30:
        pytest.skip("too few seeds in this run")
    assert failures.seeds_that_loaded >= failures.seeds * 0.5
    assert failures.loaded_tokens >= 100 * failures.seeds
    assert failures.errors >= failures.seeds * 0.2
    assert min(failures.excused, failures.aborted, failures.preemptions, failures.damaged, failures.killed) > 0


@pytest.mark.parametrize("second", [False, True], ids=["runner-v1", "runner-v2"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["step-by-step", "ahead"])
def test_nothing_is_left_of_a_request_that_is_aborted_before_its_load_is_known_to_have_failed(
    asynchronous: bool, second: bool, tmp_path: Path
) -> None:
    settings = {"use_layerwise": True, "max_sync_stall_ms": 20_000, "load_timeout_ms": 20_000, "max_held_blocks": 1000}
    shape = Shape(asynchronous=asynchronous, second_runner=second, policy="fail", settings=settings)
    prompt = list(range(20, 120))
    server = Server(shape, tmp_path)
    server.ask("a", prompt, 4)
    server.drain()
    server.until_stored(prompt, 96)
    server.close()
    assert damage.flip(tmp_path / "cache", 1, random.Random(7)) > 0
    server = Server(shape, tmp_path)
    server.ask("a", prompt, 4)

    def leaves() -> None:
        # As soon as its load has failed, and before vLLM looks at the step.
        if server.runner.doomed and not server.asked["a"].aborted:
            server.abort("a")

    while server.step(before_update=leaves):
        pass
    assert server.asked["a"].aborted
    server.ask("b", [*prompt, 7], 4)
    server.drain()
    assert server.asked["b"].finished != "error"
    server.check_outputs()
    server.check_empty()
    server.close()


@pytest.mark.parametrize("second", [False, True], ids=["runner-v1", "runner-v2"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["step-by-step", "ahead"])
def test_no_token_of_a_failed_step_is_sent_where_vllm_asks_before_the_step_has_ended(
    asynchronous: bool, second: bool, tmp_path: Path
) -> None:
    settings = {"use_layerwise": True, "max_sync_stall_ms": 20_000, "load_timeout_ms": 20_000, "max_held_blocks": 1000}
    shape = Shape(asynchronous=asynchronous, second_runner=second, asks_first=True, policy="fail", settings=settings)
    prompt = list(range(20, 120))
    server = Server(shape, tmp_path)
    server.ask("a", prompt, 4)
    server.drain()
    server.check_outputs()
    server.until_stored(prompt, 96)
    server.close()
    assert damage.flip(tmp_path / "cache", 1, random.Random(7)) > 0
    server = Server(shape, tmp_path)
    # Its first token is its last one.
    server.ask("a", prompt, 1)
    server.drain()
    assert (server.asked["a"].finished, server.asked["a"].output) == ("error", [])
    server.ask("b", prompt, 4)
    server.drain()
    assert server.asked["b"].finished != "error"
    server.check_outputs()
    server.check_empty()
    server.close()
