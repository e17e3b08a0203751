"""LMCache's L2 adapter over a cache, through both of its doors: every byte compared."""

from __future__ import annotations

import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import spec
from driving import PATIENCE_S, adapter, found, key, load, memory, same, store
from forebay.lmcache import store as limits

LENGTHS = [1, 4095, 4096, 70_001, 256 << 10, (16 << 20) + 1, 32 << 20]


@pytest.mark.ci
def test_values_of_all_sizes_come_back_after_a_restart(cache: Path, door: str) -> None:
    values = {number: memory(length, number) for number, length in enumerate(LENGTHS)}
    with adapter(spec(cache, door)) as over:
        assert found(over, list(values)) == [False] * len(values)
        assert store(over, values)
        assert found(over, [*values, 99]) == [True] * len(values) + [False]
    with adapter(spec(cache, door)) as over:
        targets = {number: memory(length, None) for number, length in enumerate(LENGTHS)}
        assert load(over, targets) == [True] * len(values)
        assert all(same(targets[number], values[number]) for number in values)


@pytest.mark.ci
def test_two_servers_share_one_cache(cache: Path, door: str) -> None:
    with adapter(spec(cache, door)) as one, adapter(spec(cache, door)) as other, adapter(spec(cache, door, namespace="apart")) as apart:
        assert store(one, {1: memory(100_000, 1)})
        target = memory(100_000, None)
        assert found(other, [1]) == [True] and load(other, {1: target}) == [True]
        assert same(target, memory(100_000, 1))
        assert found(apart, [1]) == [False]
        other.delete([key(1)])
        assert found(one, [1]) == [False]


@pytest.mark.ci
def test_a_buffer_of_another_length_and_a_missing_key_are_misses(cache: Path, door: str) -> None:
    with adapter(spec(cache, door)) as over:
        assert store(over, {1: memory(5000, 1), 2: memory(5000, 2)})
        targets = {1: memory(4999, None), 2: memory(5000, None), 3: memory(5000, None)}
        assert load(over, targets) == [False, True, False]
        assert same(targets[1], memory(4999, None)) and same(targets[2], memory(5000, 2))
        # A key that is there stays as it is; so a stored value never changes under a reader.
        assert store(over, {2: memory(5000, 3)})
        again = {2: memory(5000, None)}
        assert load(over, again) == [True] and same(again[2], memory(5000, 2))


@pytest.mark.ci
def test_batches_that_have_lmcaches_memory_for_too_long_are_ended(cache: Path, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOOK_S", 0.01)
    with adapter(spec(cache, door)) as over:
        ended: list[int] = []
        ours = over if door == "plugin" else over._client
        monkeypatch.setattr(ours._limit, "_store", lambda: SimpleNamespace(cancel=ended.append))
        assert store(over, {1: memory(5000, 1)}) and load(over, {1: memory(5000, None)}) == [True]
        assert len(ours._limit._begun) == 2 and not ended
        monkeypatch.setattr(limits, "MEMORY_S", 0.0)
        end = time.monotonic() + PATIENCE_S
        while len(ended) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert len(set(ended)) == 2 and not ours._limit._begun


@pytest.mark.ci
def test_flipped_bits_are_misses(cache: Path, door: str) -> None:
    count, length = 40, 100_000
    with adapter(spec(cache, door)) as over:
        assert store(over, {number: memory(length, number) for number in range(count)})
    source = random.Random(7)
    files = [path for path in cache.rglob("data.kv") if path.stat().st_size > 0]
    assert files
    turned = 0
    for path in files:
        data = bytearray(path.read_bytes())
        for _ in range(20):
            # Only where something was written: the rest of a segment is zeros.
            place = source.choice([at for at in source.sample(range(len(data)), 4000) if data[at]] or [0])
            data[place] ^= 1 << source.randrange(8)
            turned += 1
        path.write_bytes(data)
    with adapter(spec(cache, door)) as over:
        targets = {number: memory(length, None) for number in range(count)}
        answers = load(over, targets)
        assert all(same(targets[number], memory(length, number)) for number, answer in enumerate(answers) if answer)
        assert 0 < answers.count(False) <= turned, answers


@pytest.mark.ci
def test_a_full_cache_stays_within_its_capacity(cache: Path, door: str) -> None:
    capacity = 256 << 20
    with adapter(spec(cache, door, capacity=str(capacity))) as over:
        for first in range(0, 120, 8):
            store(over, {number: memory(4 << 20, number) for number in range(first, first + 8)})
        on_disk = sum(path.stat().st_blocks * 512 for path in cache.rglob("*") if path.is_file() and path.suffix != ".shm")
        assert on_disk <= capacity
        there = [number for number, is_there in enumerate(found(over, list(range(120)))) if is_there]
        assert there and len(there) < 120
        targets = {number: memory(4 << 20, None) for number in there}
        answers = load(over, targets)
        assert all(same(targets[number], memory(4 << 20, number)) for number, answer in zip(there, answers, strict=True) if answer)


@pytest.mark.ci
def test_stores_on_a_drive_without_space_are_refused_and_nothing_raises(cache: Path, door: str) -> None:
    state = os.statvfs(cache)
    with adapter(spec(cache, door, min_free=state.f_bavail * state.f_frsize + (4 << 30))) as over:
        for number, length in enumerate(LENGTHS):
            assert not store(over, {number: memory(length, number)})
        assert found(over, [0, 1]) == [False, False]
        assert load(over, {0: memory(LENGTHS[0], None), 1: memory(LENGTHS[1], None)}) == [False, False]


@pytest.mark.ci
def test_what_lmcache_counts_for_itself_is_refused(cache: Path, door: str) -> None:
    for setting in ("max_capacity_gb", "eviction"):
        with pytest.raises(Exception, match="capacity"):
            with adapter(spec(cache, door, **{setting: 1})):
                pass
    # What only the other door has is not known either.
    for setting in ("no_such_setting", "dtype" if door == "plugin" else "register_memory"):
        with pytest.raises(Exception, match=f"unknown setting {setting}"):
            with adapter(spec(cache, door, **{setting: True})):
                pass


@pytest.mark.ci
@pytest.mark.parametrize("namespace", [None, "", 5])
def test_a_namespace_is_a_text(cache: Path, door: str, namespace: Any) -> None:
    with pytest.raises(Exception, match="namespace is .*: give a text"):
        with adapter(spec(cache, door, namespace=namespace)):
            pass


@pytest.mark.ci
def test_an_element_type_that_no_value_has_is_refused(cache: Path) -> None:
    with pytest.raises(Exception, match="dtype is 'bf16': give .*bfloat16"):
        with adapter(spec(cache, "native_plugin", dtype="bf16")):
            pass


@pytest.mark.ci
def test_a_read_only_cache_is_served_and_stays_as_it_is(cache: Path, door: str) -> None:
    with adapter(spec(cache, door)) as over:
        assert store(over, {1: memory(5000, 1)})
    with adapter(spec(cache, door, mode="ro")) as over:
        assert not store(over, {2: memory(5000, 2)})
        over.delete([key(1)])
        assert found(over, [1, 2]) == [True, False]
        target = memory(5000, None)
        assert load(over, {1: target}) == [True] and same(target, memory(5000, 1))


def test_a_batch_that_cannot_be_taken_is_a_failed_completion(cache: Path) -> None:
    import forebay.lmcache

    connector = forebay.lmcache.Connector(cache_dir=str(cache), capacity="1GiB", min_free=0)
    number = connector.submit_batch_get(["a", "b"], [bytearray(3)])
    poll = select.poll()
    poll.register(connector.event_fd(), select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000)
    ((answered, ok, why, results),) = connector.drain_completions()
    assert (answered, ok, results) == (number, False, []) and why
    connector.close()


def test_lmcaches_bench_verifies_what_it_loads(cache: Path, door: str) -> None:
    command = [sys.executable, "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", spec(cache, door), "--num-keys", "16"]
    command += ["--data-size-kb", "1024", "--rounds", "3", "--in-flight", "2", "--no-skip-verify", "--format", "json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "mismatch" not in done.stdout.lower(), done.stdout[-3000:]
