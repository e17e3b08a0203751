"""A damaged cache changes no output and stops no server; wrong bytes under valid checksums do change the output."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from forebay.connector import gauge_names

from conftest import SEED, SHORT, Filled, generate, prompts, settings

#: Damage is only of use to a test where it is met by reads.
PAGE = 4096
#: Whole chunks of the shortest prompt.
WHOLE = 384


def data_files(cache: Path) -> list[Path]:
    """The files that hold KV."""
    found = sorted(cache.rglob("data.kv"))
    assert found, "the cache has no data files"
    return found


def flip_bits(cache: Path) -> None:
    """One flipped bit in each page of the written part of each data file."""
    source = random.Random(SEED)
    for file in data_files(cache):
        with file.open("r+b") as opened:
            size = file.stat().st_size
            for page in range(1, size // PAGE):
                opened.seek(page * PAGE)
                held = opened.read(PAGE)
                if any(held):
                    place = page * PAGE + source.randrange(PAGE)
                    opened.seek(place)
                    byte = opened.read(1)[0]
                    opened.seek(place)
                    opened.write(bytes([byte ^ (1 << source.randrange(8))]))


def truncate(cache: Path) -> None:
    """Data files that end after their first page."""
    for file in data_files(cache):
        with file.open("r+b") as opened:
            opened.truncate(PAGE)


def remove_data(cache: Path) -> None:
    """No data files."""
    for file in data_files(cache):
        file.unlink()


@pytest.mark.ci
def test_flipped_bits_change_no_output_and_are_repaired(
    model: str, plain: list[list[int]], filled: Filled, tmp_path: Path
) -> None:
    cache = filled.copy(tmp_path)
    flip_bits(cache)
    # Ends of prompts behind a damaged beginning are only found damaged once that is repaired: in
    # the second round.
    run = generate(tmp_path, SHORT, SHORT, SHORT, model=model, cache=settings(cache))
    assert [run.tokens(number) for number in range(3)] == [plain] * 3
    assert run.reasons() == {"length"}
    assert run.metrics.get("vllm:forebay_failed_loads", 0) > 0, "the damage must be met"
    assert run.metrics["vllm:forebay_missed_chunks:corrupt"] > 0, "and an operator is to see it"
    assert {name: run.metrics[f"vllm:forebay_{name}"] for name in gauge_names()} == dict.fromkeys(gauge_names(), 0)
    assert all(cached >= WHOLE for cached in run.cached(2)), "all that was damaged must be stored again"


@pytest.mark.parametrize("damage", [truncate, remove_data], ids=lambda d: d.__name__)
def test_lost_files_change_no_output(
    model: str, plain: list[list[int]], filled: Filled, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    cache = filled.copy(tmp_path)
    damage(cache)
    run = generate(tmp_path, SHORT, SHORT, model=model, cache=settings(cache))
    assert (run.tokens(0), run.tokens(1)) == (plain, plain)
    assert run.reasons() == {"length"}


@pytest.mark.parametrize(("kind", "more"), [((), 0), (("gemma", "window"), 2)], ids=["full", "window"])
def test_damage_met_layer_by_layer_ends_that_request_alone(
    kind: tuple[str, ...], more: int, models: Callable[..., str], tmp_path: Path
) -> None:
    # Where all layers have the window, a load reads the last of three damaged chunks alone, and the
    # next tries meet the others.
    model = models("float32", *kind)
    asked = prompts(3, shared=0, own=430)
    plain = generate(tmp_path, {"prompts": asked}, model=model).tokens()
    cache = tmp_path / "cache"
    generate(tmp_path, {"prompts": asked[:1]}, model=model, cache=settings(cache))
    flip_bits(cache)
    # As users run vLLM: asynchronous scheduling, prefix caching, and `kv_load_failure_policy:
    # fail`. No load may move between steps.
    within = settings(cache, use_layerwise=True, max_sync_stall_ms=60_000, load_timeout_ms=60_000)
    ahead = {"async_scheduling": True, "enable_prefix_caching": True}
    rounds = ({"prompts": asked[1:]}, {"prompts": asked}, *[{"prompts": asked[:1]}] * more, {"prompts": asked, "keep": True})
    run = generate(tmp_path, *rounds, model=model, cache=within, engine=ahead)
    assert run.tokens(0) == plain[1:]
    assert [output["reason"] for output in run.rounds[1]] == ["error", "length", "length"]
    assert run.tokens(1) == [[], *plain[1:]]
    assert all(cached >= WHOLE for cached in run.cached(1)[1:])
    assert [run.rounds[2 + at][0]["reason"] for at in range(more)] == ["error"] * more
    # Nothing of the failed load is left in vLLM's prefix cache, nor offered by Forebay; the others'
    # blocks are still there.
    assert run.tokens(2 + more) == plain
    assert run.cached(2 + more)[0] == 0 and all(cached >= WHOLE for cached in run.cached(2 + more)[1:])


@pytest.mark.ci
def test_loaded_kv_is_used(model: str, plain: list[list[int]], tmp_path: Path) -> None:
    # Blocks are zeroed before they are stored, so their checksums are right and their content is
    # wrong.
    run = generate(tmp_path, SHORT | {"zero_stored": True}, SHORT, model=model, cache=settings(tmp_path / "cache"))
    assert run.loaded_in(1) >= WHOLE
    assert run.tokens(1) != plain, "loaded KV was not used"
