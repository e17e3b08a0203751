"""A damaged cache changes no output and stops no server; wrong bytes under valid checksums do change the output."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SEED, generate, prompts, settings

#: Damage is only of use to a test where it is met by reads.
PAGE = 4096


@pytest.fixture(scope="module")
def filled(model: str, plain: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds `prompts()`; tests work on copies."""
    folder = tmp_path_factory.mktemp("filled")
    run = generate(folder, model=model, prompts=prompts(), cache=settings(folder / "cache"))
    assert run.tokens() == plain
    return folder / "cache"


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


@pytest.mark.parametrize("damage", [flip_bits, truncate, remove_data], ids=lambda d: d.__name__)
def test_damage_changes_no_output(
    model: str, plain: list[list[int]], filled: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(filled, tmp_path / "cache")
    damage(tmp_path / "cache")
    run = generate(tmp_path, model=model, prompts=prompts(), cache=settings(tmp_path / "cache"), rounds=2)
    assert run.tokens(0) == plain
    assert run.tokens(1) == plain
    assert all(output["reason"] == "length" for outputs in run.rounds for output in outputs)


def test_an_undamaged_copy_is_loaded(model: str, plain: list[list[int]], filled: Path, tmp_path: Path) -> None:
    # Without this the tests above could pass because a copied cache is never read.
    shutil.copytree(filled, tmp_path / "cache")
    run = generate(tmp_path, model=model, prompts=prompts(), cache=settings(tmp_path / "cache"))
    assert run.tokens() == plain
    assert run.loaded >= 384


def test_loaded_kv_is_used(model: str, plain: list[list[int]], tmp_path: Path) -> None:
    # Blocks are zeroed before they are stored, so their checksums are right and their content is wrong.
    cache = settings(tmp_path / "cache")
    hook = {"model": model, "prompts": prompts(), "cache": cache}
    generate(tmp_path, **hook, zero_stored=True)
    run = generate(tmp_path, **hook)
    assert run.loaded >= 384
    assert run.tokens() != plain, "loaded KV was not used"
