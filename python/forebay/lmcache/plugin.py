"""The adapter class that LMCache's `plugin` L2 adapter makes: LMCache's own interface, over Forebay's object store.

LMCache's two controller threads submit tasks and poll three descriptors, one each for stores, lookups and loads. A thread here takes the store's
completions and wakes the controller that waits for each.

Invariants:
- A load fills the whole buffer with verified bytes, or the key is answered with no.
- What a lookup found stays until `submit_unlock`, or for `PIN_S`, whichever is first.
- A buffer belongs to LMCache and stays valid until its task has been answered; that is LMCache's side of the interface.
- Capacity and eviction are the store's, for all servers of a cache. LMCache hears of it, and never evicts here by itself.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed import api
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

import forebay
from forebay.lmcache.store import open_store

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

logger = logging.getLogger("forebay.lmcache")


def name_of(key: ObjectKey) -> str:
    """The key of a value: LMCache's own text form, which `native_plugin` is given too."""
    salt = f"@{key.cache_salt}" if key.cache_salt else ""
    return f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}{salt}"


class Adapter(L2AdapterInterface):
    """LMCache's values as objects. `params` are Forebay's settings and `namespace`, as `adapter_params` gives them."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__()
        self._store = open_store(**params)
        self._lock = threading.Lock()
        self._tasks: dict[int, tuple[str, list[ObjectKey]]] = {}
        self._done: dict[str, dict[int, Any]] = {"store": {}, "lookup": {}, "load": {}}
        self._wake = {kind: create_event_notifier() for kind in self._done}
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="forebay-lmcache", daemon=True)
        self._thread.start()

    @property
    def supports_global_eviction(self) -> bool:
        """Never: `capacity` bounds the cache for all of its servers."""
        return False

    def get_memory_tags(self) -> Any:
        """Storage of this host. Versions before 0.5.7 have no tags, and do not ask."""
        return api.MemoryTags(api.MemorySegment.STORAGE, api.MemoryResidency.LOCAL)

    def get_store_event_fd(self) -> int:
        return self._wake["store"].fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._wake["lookup"].fileno()

    def get_load_event_fd(self) -> int:
        return self._wake["load"].fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Stores each value under its key. A key that is stored already stays as it is, and is a yes."""
        return self._submit("store", keys, lambda: self._store.submit_put(pairs(keys, objects)))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done, self._done["store"] = self._done["store"], {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]) -> int:
        return self._submit("lookup", keys, lambda: self._store.submit_exists([name_of(key) for key in keys]))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._done["lookup"].pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        pass

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Fills each buffer with the value of its key."""
        return self._submit("load", keys, lambda: self._store.submit_get(pairs(keys, objects)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._done["load"].pop(task_id, None)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Removes the values of the keys, durably, for all servers."""
        self._store.delete([name_of(key) for key in keys])

    def report_status(self) -> dict[str, Any]:
        stats = self._store.stats()
        return {"is_healthy": self._store.is_up and self._thread.is_alive(), "type": "forebay", **stats}

    def close(self) -> None:
        """Waits for tasks under way, makes what was stored durable, and closes."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._store.close()
        os.close(self._stop)
        self._stop = -1
        for notifier in self._wake.values():
            notifier.close()
