"""LMCache's L2 adapter, made by LMCache from the JSON line, and driven as its controllers do."""

from __future__ import annotations

import json
import random
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

PATIENCE_S = 60
NO_LAYOUT = MemoryLayoutDesc(shapes=[], dtypes=[])


@contextmanager
def adapter(line: str, arena: Any = None) -> Iterator[Any]:
    """The adapter that LMCache's server makes of `--l2-adapter`, and of what its memory is."""
    given = json.loads(line)
    config = get_l2_adapter_config_class(given["type"]).from_dict(given)
    made = create_l2_adapter_from_registry(config, arena)
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
        if poll.poll(1000):
            consume_fd(descriptor)
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
