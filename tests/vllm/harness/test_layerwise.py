"""Fuzzed servers that load layer by layer while a step computes: nobody reports the end of such a load, and what it brings may fail in the
step that computes from it. Then either vLLM computes it, which is sound one step after the other and without prefix caching, or it ends
the request with an error."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from . import damage, lifted
from .fuzz import Fuzz, Tally, failing, within_steps
from .kv import generated
from .server import CHUNK_TOKENS, Server, Shape
from .test_fuzz import CHOSEN


@pytest.mark.parametrize("seed", CHOSEN)
def test_every_request_ends_with_the_right_tokens(seed: int, tmp_path: Path, tally: Tally, device: str) -> None:
    fuzz = Fuzz(seed, tmp_path, tally, device, change=within_steps)
    print(f"seed {seed}: {fuzz.shape}")
    fuzz.run()


def test_the_seeds_met_what_they_are_for(tally: Tally) -> None:
    print(tally)
    if tally.seeds < 18:
        pytest.skip("too few seeds in this run")
    assert tally.seeds_that_loaded >= tally.seeds * 0.3
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
    if failures.seeds < 18:
        pytest.skip("too few seeds in this run")
    assert failures.seeds_that_loaded >= failures.seeds * 0.3
    assert failures.loaded_tokens >= 100 * failures.seeds
    assert failures.errors >= failures.seeds * 0.2
    assert min(failures.excused, failures.aborted, failures.preemptions, failures.damaged, failures.killed) > 0


#: No multiple of a block, shorter than a chunk, longer than three chunks, and as long as a block.
WINDOWS = (50, 24, 100, 16)
STAGES: tuple[dict[str, Any], ...] = (
    {"ranks": 2, "stages": 2},
    {"ranks": 1, "stages": 3, "elsewhere": (1, 2)},
    {"ranks": 1, "stages": 2},
    {"ranks": 2, "stages": 3},
)


@pytest.fixture(scope="module")
def tallies() -> dict[str, Tally]:
    """Of servers with a window, and of servers with stages, which are refused."""
    return {"window": Tally(), "stages": Tally()}


# Fewer seeds: each window is among them.
@pytest.mark.parametrize("seed", CHOSEN[::5])
def test_with_a_window_every_request_ends_with_the_right_tokens_or_its_own_load_has_failed(
    seed: int, tmp_path: Path, tallies: dict[str, Tally], device: str
) -> None:
    window = WINDOWS[seed % len(WINDOWS)]
    fuzz = Fuzz(seed, tmp_path, tallies["window"], device, (window,), change=failing)
    print(f"seed {seed}: {fuzz.shape}")
    fuzz.run()


@pytest.mark.parametrize("seed", CHOSEN[::11])
def test_with_stages_every_token_would_be_right(
    seed: int, tmp_path: Path, tallies: dict[str, Tally], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifted.lift(monkeypatch)
    fuzz = Fuzz(seed, tmp_path, tallies["stages"], device, ranks=STAGES[seed % len(STAGES)], change=failing)
    print(f"seed {seed}: {fuzz.shape}")
    fuzz.run()


@pytest.mark.parametrize("kind", ["window", "stages"])
def test_the_seeds_with_a_window_or_stages_met_failures(kind: str, tallies: dict[str, Tally]) -> None:
    tally = tallies[kind]
    print(tally)
    if tally.seeds < 18:
        pytest.skip("too few seeds in this run")
    assert tally.seeds_that_loaded >= tally.seeds * 0.3
    assert tally.errors >= tally.seeds * 0.2
    assert min(tally.excused, tally.aborted, tally.preemptions, tally.damaged, tally.killed) > 0


def damaged(shape: Shape, prompt: list[int], folder: Path) -> Server:
    """A server over a cache in which one worker's KV of a prompt is damaged."""
    settings = {"use_layerwise": True, "max_sync_stall_ms": 20_000, "load_timeout_ms": 20_000, "max_held_blocks": 1000}
    shape = dataclasses.replace(shape, settings=settings)
    server = Server(shape, folder)
    server.ask("a", prompt, 4)
    server.drain()
    server.check_outputs()
    server.until_stored(prompt, len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS)
    server.close()
    assert damage.flip(folder / "cache", 1, random.Random(7)) > 0
    return Server(shape, folder)


@pytest.mark.parametrize("second", [False, True], ids=["runner-v1", "runner-v2"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["step-by-step", "ahead"])
@pytest.mark.parametrize("windows", [(None, 50), (None, None)], ids=["groups-window", "groups"])
def test_wrong_tokens_would_be_sent_with_several_groups(
    windows: tuple[int | None, ...], asynchronous: bool, second: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There workers name no block of a failed load, but its request, of which vLLM takes no notice.
    lifted.lift(monkeypatch)
    prompt = list(range(20, 120))
    shape = Shape(asynchronous=asynchronous, second_runner=second, policy="fail", windows=windows)
    server = damaged(shape, prompt, tmp_path)
    server.runner.strict = False
    server.ask("a", prompt, 4)
    server.drain()
    assert server.runner.wrong
    assert (server.asked["a"].finished, len(server.asked["a"].output)) == ("length", 4)
    assert server.asked["a"].output != generated(prompt, 4)
    server.close()


@pytest.mark.parametrize("second", [False, True], ids=["runner-v1", "runner-v2"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["step-by-step", "ahead"])
@pytest.mark.parametrize("more", [{}, {"windows": (50,)}, {"stages": 2}, {"stages": 3}], ids=["plain", "window", "stages-2", "stages-3"])
def test_one_request_ends_with_an_error_and_would_with_stages(
    more: dict[str, Any], asynchronous: bool, second: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "stages" in more:
        lifted.lift(monkeypatch)
        if asynchronous and not second:
            pytest.skip("stages ahead need vLLM's second runner")
    prompt = list(range(20, 120))
    server = damaged(Shape(asynchronous=asynchronous, second_runner=second, policy="fail", **more), prompt, tmp_path)
    server.ask("a", prompt, 4)
    server.drain()
    assert (server.asked["a"].finished, server.asked["a"].output) == ("error", [])
    # Other chunks are damaged too: each try meets one, and leaves nothing in vLLM's prefix cache.
    for number in range(4):
        server.ask(f"b{number}", [*prompt, 7], 4)
        server.drain()
    assert server.asked["b3"].finished == "length"
    server.check_outputs()
    server.check_empty()
    server.close()


@pytest.mark.parametrize("second", [False, True], ids=["runner-v1", "runner-v2"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["step-by-step", "ahead"])
def test_nothing_is_left_of_a_request_that_is_aborted_before_its_load_is_known_to_have_failed(
    asynchronous: bool, second: bool, tmp_path: Path
) -> None:
    prompt = list(range(20, 120))
    server = damaged(Shape(asynchronous=asynchronous, second_runner=second, policy="fail"), prompt, tmp_path)
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
    prompt = list(range(20, 120))
    server = damaged(Shape(asynchronous=asynchronous, second_runner=second, asks_first=True, policy="fail"), prompt, tmp_path)
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
