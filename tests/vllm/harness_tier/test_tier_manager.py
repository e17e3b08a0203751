"""The tier under vLLM's real tiering manager: eviction, restart, damage, a full cache; every byte is compared."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import vllm
from test_damage import flip_bits, remove_data, truncate
from tier_world import ROW, World, key, keys

import forebay
from forebay.vllm.geometry import Unsupported

SEED = int(os.environ.get("FOREBAY_TEST_SEED", "7"))
COUNT = 12


DAMAGES = pytest.mark.parametrize("damage", [flip_bits, truncate, remove_data], ids=lambda d: d.__name__)


def fill(world: World, count: int = COUNT) -> None:
    """`count` blocks, two at a time, more than the CPU tier holds."""
    for number in range(0, count, 2):
        assert world.store(keys(number, number + 1)) == keys(number, number + 1)


def test_evicted_blocks_come_back(tmp_path: Path) -> None:
    with World(tmp_path, rows=4) as world:
        fill(world)
        for first in range(0, COUNT, 2):
            assert world.load(keys(first, first + 1)) == 2
        assert world.load(keys(0, 1, 99)) == 2
        assert world.load(keys(99)) == 0


@pytest.mark.ci
def test_blocks_come_back_after_a_restart(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        fill(world)
    with World(tmp_path, rows=COUNT) as world:
        assert world.load(keys(*range(COUNT))) == COUNT


def test_what_is_stored_is_not_written_again(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        fill(world, 4)
    with World(tmp_path) as world:
        # The restarted CPU tier is empty, so vLLM hands the same blocks on once more.
        assert world.store(keys(0, 1, 2, 3)) == keys(0, 1, 2, 3)
        after = world.tier._transfers._store.stats()
        assert (after["put"]["ok"], after["put"]["bytes"]) == (0, 0), after


@pytest.mark.ci
@DAMAGES
def test_damage_before_a_start_is_a_miss(tmp_path: Path, damage) -> None:
    with World(tmp_path) as world:
        fill(world)
    damage(tmp_path)
    with World(tmp_path, rows=COUNT) as world:
        assert world.load(keys(*range(COUNT))) < COUNT
        for number in range(COUNT):
            world.load(keys(number))
        # What is computed again is stored again, and found from then on.
        for number in range(COUNT):
            world.store(keys(number))
    with World(tmp_path, rows=COUNT) as world:
        assert world.load(keys(*range(COUNT))) == COUNT


@DAMAGES
def test_damage_under_a_running_server_is_a_miss(tmp_path: Path, damage) -> None:
    with World(tmp_path, rows=4) as world:
        fill(world)
        damage(tmp_path)
        found = sum(world.load(keys(number)) for number in range(COUNT))
        if damage is not remove_data:
            # The last four are in the CPU tier still; files that are open outlive their names.
            assert found <= 4
        for number in range(COUNT):
            world.store(keys(number))
            assert world.load(keys(number)) == 1


def test_a_part_of_a_load_that_fails_leaves_the_rest(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        fill(world)
    with World(tmp_path, rows=COUNT) as world:
        # All twelve are asked for at once; one of them is gone when the load begins.
        context = world.request()
        while world._prefix(keys(*range(COUNT)), context) is None:
            if world.manager._pending_load_submissions:
                world.tier._transfers._store.delete([key(5)])
            world.step()
        assert world._prefix(keys(*range(COUNT)), context) == 5
        assert world._prefix(keys(*range(6, COUNT)), context) == COUNT - 6
        world.manager.on_request_finished(context)
        assert world.load(keys(*range(COUNT))) == 5


def test_a_removed_cache_stops_nothing(tmp_path: Path) -> None:
    with World(tmp_path / "cache", rows=4) as world:
        fill(world)
        shutil.rmtree(tmp_path / "cache")
        for number in range(COUNT + 8):
            world.load(keys(number))
            world.store(keys(number))


def test_a_full_cache_drops_blocks_and_goes_on(tmp_path: Path) -> None:
    row, count = 2 << 20, 120
    with World(tmp_path, rows=4, row=row, tier={"capacity": "128MiB"}) as world:
        for number in range(count):
            world.store(keys(number))
        found = sum(world.load(keys(number)) for number in range(count))
        assert 4 <= found < count
        assert sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("*") if f.is_file()) <= 160 << 20


def test_groups_are_apart(tmp_path: Path) -> None:
    with World(tmp_path, rows=4) as world:
        world.store([key(1, 0), key(1, 1)])
        world.store(keys(2, 3, 4, 5))
        assert world.load([key(1, 0)]) == 1
        assert world.load([key(1, 1)]) == 1
        assert world.load([key(1, 2)]) == 0


@pytest.mark.parametrize("change", [{"model": "other"}, {"row": ROW + 4096}, {"tier": {"fingerprint": "other"}}], ids=str)
def test_another_model_does_not_see_the_blocks(tmp_path: Path, change) -> None:
    with World(tmp_path) as world:
        fill(world)
    with World(tmp_path, **change) as world:
        assert world.load(keys(0)) == 0
    with World(tmp_path) as world:
        assert world.load(keys(0)) == 1


def test_a_late_load_is_a_miss(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        fill(world)
    with World(tmp_path, tier={"load_timeout_ms": 0}, rows=COUNT) as world:
        for _ in range(3):
            world.load(keys(*range(COUNT)))


def test_nothing_is_kept_of_finished_requests(tmp_path: Path) -> None:
    with World(tmp_path, rows=4) as world:
        fill(world)
        for number in range(2 * COUNT):
            world.load(keys(number))
        transfers = world.tier._transfers
        assert (len(transfers.lookups), transfers._jobs, len(transfers._waiting), len(transfers._loads)) == (0, 0, 0, 0)


def test_shutdown_frees_the_memory(tmp_path: Path) -> None:
    world = World(tmp_path)
    region = Path(world.spec._scheduler_mmap.mmap_path)
    assert region.exists()
    world.store(keys(0, 1, 2), settle=False)
    world.close()
    assert not region.exists()
    with World(tmp_path) as world:
        assert world.load(keys(0, 1, 2)) == 3, "what was on its way at the shutdown is not there"


def test_after_a_reset_the_tier_rests(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        fill(world)
        world.store(keys(20, 21), settle=False)
        world.reset()
        assert world.load(keys(0)) == 0
        world.store(keys(30))
    with World(tmp_path, tier={"keep_after_reset": True}) as world:
        assert (world.load(keys(0)), world.load(keys(21)), world.load(keys(30))) == (1, 1, 0)
        world.reset()
        assert world.load(keys(0)) == 1


def test_a_read_only_cache_is_only_read(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        fill(world)
    with World(tmp_path, tier={"mode": "ro"}, rows=4) as world:
        assert world.load(keys(0)) == 1
        world.store(keys(50, 51))
    with World(tmp_path) as world:
        assert world.load(keys(50)) == 0


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    refused = {
        "capasity": ({"capasity": "1GiB"}, "capasity"),
        "range": ({"load_timeout_ms": 3600001}, "use 0 to 3600000 ms"),
        "model": ({"fingerprint": ""}, "name model, revision and quantisation in `fingerprint`"),
        "drive": ({"gds_config": {}}, "cache_dir"),
        "word": ({"keep_after_reset": "ture"}, "keep_after_reset is 'ture': give true or false"),
        "locality": ({"locality": "here"}, "locality is 'here': give one of LOCAL"),
        "limit": ({"load_limit": "module:function"}, "load_limit has no effect here"),
    }
    for tier, says in refused.values():
        with pytest.raises((ValueError, forebay.ConfigError), match=says):
            World(tmp_path, tier=tier)


def test_another_vllm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    with pytest.raises(Unsupported, match="0.34.1.*0.32 and 0.33"):
        World(tmp_path)


def test_events_name_what_is_stored(tmp_path: Path) -> None:
    with World(tmp_path, tier={"enable_kv_events": True}, enable_kv_cache_events=True) as world:
        world.store(keys(0, 1))
        told = [(event.medium.value, event.removed, event.keys) for event in world.tier.take_events()]
        assert told == [("STORAGE", False, keys(0, 1))]
        assert list(world.tier.take_events()) == []
        world.reset()
        world.store(keys(2))
        assert list(world.tier.take_events()) == [], "the tier rests"
    with World(tmp_path, tier={"enable_kv_events": True, "mode": "ro"}, enable_kv_cache_events=True) as world:
        world.store(keys(3))
        assert list(world.tier.take_events()) == [], "nothing is stored"


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_any_order_of_events_gives_right_bytes_and_an_end(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    source = random.Random(seed)
    world = World(tmp_path, rows=6)
    loaded = 0
    for _ in range(120):
        numbers = sorted(source.sample(range(30), source.randint(1, 4)))
        match source.choices(("store", "load", "flip", "restart"), (60, 60, 2, 3))[0]:
            case "store":
                world.store(keys(*numbers), settle=source.random() < 0.5)
            case "load":
                loaded += world.load(keys(*numbers))
            case "flip":
                flip_bits(tmp_path)
            case "restart":
                world.close()
                world = World(tmp_path, rows=6)
    world.close()
    assert loaded > 10
