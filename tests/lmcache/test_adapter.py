"""LMCache's L2 adapter, made by LMCache from the JSON line, over a cache: every byte compared."""

from __future__ import annotations

import json
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import spec
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

PATIENCE_S = 60
NO_LAYOUT = MemoryLayoutDesc(shapes=[], dtypes=[])


@contextmanager
def adapter(line: str) -> Iterator[Any]:
    """The adapter that LMCache's server makes of `--l2-adapter`."""
    given = json.loads(line)
    config = get_l2_adapter_config_class(given["type"]).from_dict(given)
    made = create_l2_adapter_from_registry(config)
    try:
        yield made
    finally:
        made.close()


def key(number: int, salt: str = "") -> ObjectKey:
    """A key as LMCache makes them."""
    return ObjectKey(chunk_hash=number.to_bytes(32, "big"), model_name="org/model", kv_rank=0, cache_salt=salt)


def memory(length: int, fill: int | None) -> TensorMemoryObj:
    """A value of `length` bytes: the bytes that `fill` seeds, or none yet."""
    data = torch.zeros(length, dtype=torch.uint8)
    if fill is not None:
        data = torch.frombuffer(bytearray(random.Random(fill).randbytes(length)), dtype=torch.uint8)
    metadata = MemoryObjMetadata(
        shape=torch.Size([length]), dtype=torch.uint8, address=0, phy_size=length, fmt=MemoryFormat.BINARY_BUFFER, ref_count=1
    )
    return TensorMemoryObj(raw_data=data, metadata=metadata, parent_allocator=None)


def wait(descriptor: int, taken: Any) -> Any:
    """What `taken` gives when the descriptor has been readable."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        poll.poll(1000)
        result = taken()
        if result:
            return result
    raise AssertionError("no completion")


def store(over: Any, values: dict[int, TensorMemoryObj]) -> bool:
    task = over.submit_store_task([key(number) for number in values], list(values.values()))
    return wait(over.get_store_event_fd(), over.pop_completed_store_tasks)[task].is_successful()


def bits(bitmap: Any, count: int) -> list[bool]:
    return [bitmap.test(place) for place in range(count)]


def found(over: Any, numbers: list[int]) -> list[bool]:
    task = over.submit_lookup_and_lock_task([key(number) for number in numbers], {0: NO_LAYOUT})
    answer = wait(over.get_lookup_and_lock_event_fd(), lambda: over.query_lookup_and_lock_result(task))
    over.submit_unlock([key(number) for number in numbers])
    return bits(answer, len(numbers))


def load(over: Any, targets: dict[int, TensorMemoryObj]) -> list[bool]:
    task = over.submit_load_task([key(number) for number in targets], list(targets.values()))
    return bits(wait(over.get_load_event_fd(), lambda: over.query_load_result(task)), len(targets))


def same(one: TensorMemoryObj, other: TensorMemoryObj) -> bool:
    return bytes(one.byte_array) == bytes(other.byte_array)


LENGTHS = [1, 4095, 4096, 70_001, 256 << 10, (16 << 20) + 1, 32 << 20]


@pytest.mark.ci
def test_values_of_all_sizes_come_back_after_a_restart(cache: Path) -> None:
    values = {number: memory(length, number) for number, length in enumerate(LENGTHS)}
    with adapter(spec(cache)) as over:
        assert found(over, list(values)) == [False] * len(values)
        assert store(over, values)
        assert found(over, [*values, 99]) == [True] * len(values) + [False]
    with adapter(spec(cache)) as over:
        targets = {number: memory(length, None) for number, length in enumerate(LENGTHS)}
        assert load(over, targets) == [True] * len(values)
        assert all(same(targets[number], values[number]) for number in values)


@pytest.mark.ci
def test_two_servers_share_one_cache(cache: Path) -> None:
    with adapter(spec(cache)) as one, adapter(spec(cache)) as other, adapter(spec(cache, namespace="apart")) as apart:
        assert store(one, {1: memory(100_000, 1)})
        target = memory(100_000, None)
        assert found(other, [1]) == [True] and load(other, {1: target}) == [True]
        assert same(target, memory(100_000, 1))
        assert found(apart, [1]) == [False]
        other.delete([key(1)])
        assert found(one, [1]) == [False]


@pytest.mark.ci
def test_a_buffer_of_another_length_and_a_missing_key_are_misses(cache: Path) -> None:
    with adapter(spec(cache)) as over:
        assert store(over, {1: memory(5000, 1), 2: memory(5000, 2)})
        targets = {1: memory(4999, None), 2: memory(5000, None), 3: memory(5000, None)}
        assert load(over, targets) == [False, True, False]
        assert same(targets[1], memory(4999, None)) and same(targets[2], memory(5000, 2))
        # A key that is there stays as it is; so a stored value never changes under a reader.
        assert store(over, {2: memory(5000, 3)})
        again = {2: memory(5000, None)}
        assert load(over, again) == [True] and same(again[2], memory(5000, 2))


@pytest.mark.ci
def test_turned_bits_are_misses(cache: Path) -> None:
    count, length = 40, 100_000
    with adapter(spec(cache)) as over:
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
    with adapter(spec(cache)) as over:
        targets = {number: memory(length, None) for number in range(count)}
        answers = load(over, targets)
        assert all(same(targets[number], memory(length, number)) for number, answer in enumerate(answers) if answer)
        assert 0 < answers.count(False) <= turned, answers


@pytest.mark.ci
def test_a_full_cache_stays_within_its_capacity(cache: Path) -> None:
    capacity = 256 << 20
    with adapter(spec(cache, capacity=str(capacity))) as over:
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
def test_what_lmcache_counts_for_itself_is_refused(cache: Path) -> None:
    for setting in ("max_capacity_gb", "eviction"):
        with pytest.raises(Exception, match="capacity"):
            with adapter(spec(cache, **{setting: 1})):
                pass
    with pytest.raises(Exception, match="no_such_setting"):
        with adapter(spec(cache, no_such_setting=1)):
            pass


def test_a_batch_that_cannot_be_taken_is_a_failed_completion(cache: Path) -> None:
    import forebay.lmcache

    connector = forebay.lmcache.Connector(cache_dir=str(cache), capacity="1GiB")
    number = connector.submit_batch_get(["a", "b"], [bytearray(3)])
    poll = select.poll()
    poll.register(connector.event_fd(), select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000)
    ((answered, ok, why, results),) = connector.drain_completions()
    assert (answered, ok, results) == (number, False, [False, False]) and why
    connector.close()


def test_lmcaches_bench_verifies_what_it_loads(cache: Path) -> None:
    command = [sys.executable, "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", spec(cache), "--num-keys", "16"]
    command += ["--data-size-kb", "1024", "--rounds", "3", "--in-flight", "2", "--no-skip-verify", "--format", "json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "mismatch" not in done.stdout.lower(), done.stdout[-3000:]
