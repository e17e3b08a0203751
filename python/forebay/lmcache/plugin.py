"""The adapter class that LMCache's `plugin` L2 adapter makes: LMCache's own interface, over Forebay's object store.

LMCache's controller threads submit tasks and poll three descriptors, one each for stores, lookups and loads. A thread here takes the store's
completions and wakes the controller that waits for each. Lookups need no drive and are answered at once.

Invariants:
- A load fills the whole buffer with verified bytes, or the key is answered with no.
- What a lookup has answered with yes is not evicted until `submit_unlock`, or for `PIN_S` seconds, whichever is first, as far as `lease_share`
  allows leases.
- A buffer belongs to LMCache, which locks it for a while and then gives it to others, whether its task was answered or not. So it is not
  used for longer than `store.MEMORY_S`, but by the kernel where LMCache's memory is registered: by default it is not.
- A value is loaded with the shapes and element types that it was stored with, and with no others: its name has their digest, as LMCache's
  keys do not tell them apart. Mere bytes have the plain name.
- Capacity and eviction are the store's, for all servers of a cache. LMCache is told what has gone, and never evicts here by itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed import api
from lmcache.v1.distributed.api import EncodedObjectKey, KeyEntry, KeyListPage, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

import forebay
from forebay._quiet import Quiet
from forebay.lmcache.store import TimeLimit, open_store

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

logger = logging.getLogger("forebay.lmcache")

#: The longest that a lookup keeps values from eviction, in seconds. LMCache unlocks after the load,
#: much sooner; a server that was killed never does.
PIN_S = 60.0
#: How long an eviction may wait until LMCache is notified, in milliseconds.
TELL_MS = 1000
#: How often is looked for what other servers have evicted or deleted, in seconds.
LOOK_S = 60.0


class Adapter(L2AdapterInterface):
    """LMCache's values as objects. `params` is `adapter_params`: the arguments of `open_store`, and whether LMCache's memory is registered."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__()
        self._quiet = Quiet(logger)
        params = {"register_memory": False, **params}
        if not isinstance(registers := params.pop("register_memory"), bool):
            raise forebay.ConfigError(f"register_memory is {registers!r}: give true or false")
        self._store = open_store(**params)
        self._limit = TimeLimit(self._store)
        if registers and l1_memory_desc is not None and l1_memory_desc.stable_registration_size:
            self._register(l1_memory_desc.ptr, l1_memory_desc.stable_registration_size)
        self._lock = threading.Lock()
        #: Stores and loads under way, by their number: the keys, and the names of their values.
        self._tasks: dict[int, list[tuple[ObjectKey, str]]] = {}
        #: Layouts that were stored, looked for, loaded or listed here, by model, rank and object
        #: group: LMCache gives none with what it unlocks, touches and deletes.
        self._layouts: dict[tuple[str, int, int], set[str]] = {}
        #: What LMCache has not asked for yet, by kind and number.
        self._done: dict[str, dict[int, Any]] = {"store": {}, "lookup": {}, "load": {}}
        self._lookups = 0
        #: Values that LMCache was told are stored and that are not known to be gone, by digest:
        #: key, and length in bytes as LMCache counts it, 0 where another server stored the value.
        self._stored: dict[bytes, tuple[ObjectKey, int]] = {}
        self._wake = {kind: create_event_notifier() for kind in self._done}
        # The store records evictions from the first call on.
        self._store.drain_evicted()
        self._is_closed = False
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="forebay-lmcache", daemon=True)
        self._thread.start()

    def _register(self, address: int, length: int) -> None:
        try:
            self._store.register_memory((ctypes.c_ubyte * length).from_address(address))
        except forebay.ForebayError as error:
            logger.warning("LMCache's memory could not be registered, each value is copied once: %s", error)

    @property
    def supports_global_eviction(self) -> bool:
        """Never: `capacity` bounds the cache for all of its servers."""
        return False

    def get_memory_tags(self) -> Any:
        """Storage of this host. LMCache asks from 0.5.7 on; before, there are no tags."""
        return api.MemoryTags(api.MemorySegment.STORAGE, api.MemoryResidency.LOCAL)

    def get_store_event_fd(self) -> int:
        """Readable when stores have ended."""
        return int(self._wake["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when lookups have ended."""
        return int(self._wake["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        """Readable when loads have ended."""
        return int(self._wake["load"].fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Stores each value under its key. A key that is stored already stays as it is, and is a yes."""
        dtype = common_dtype(objects)
        return self._submit(lambda pairs: self._store.submit_put(pairs, dtype=dtype), keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """The stores that have ended since the last call."""
        with self._lock:
            done, self._done["store"] = self._done["store"], {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]) -> int:
        """Which values are stored. Each of them is kept until it is unlocked, for `PIN_S` at most, as far as `lease_share` allows."""
        layouts = {group: layout(desc.shapes, desc.dtypes) for group, desc in group_layout_descs.items()}
        names = [self._name(key, layouts.get(key.object_group_id, "")) for key in keys]
        found = self._pin(names)
        # Behind a `serde` LMCache looks for the layout that it makes of the stored bytes. A load
        # takes what has the name of its own buffers, so that a yes too many is a miss there.
        again = [place for place, yes in enumerate(found) if not yes and names[place] != name(keys[place])]
        for place, yes in zip(again, self._pin([name(keys[place]) for place in again]), strict=True):
            found[place] = yes
        with self._lock:
            self._lookups += 1
            task = self._lookups
            self._done["lookup"][task] = bitmap(found)
        self._wake["lookup"].notify()
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """A lookup's answers, once."""
        with self._lock:
            return self._done["lookup"].pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Releases one lock of each key."""
        self._store.unpin([one for key in keys for one in self._names(key)])

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Fills each buffer with the value of its key."""
        return self._submit(self._store.submit_get, keys, objects)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """A load's answers, once."""
        with self._lock:
            return self._done["load"].pop(task_id, None)

    def submit_touch(self, keys: list[ObjectKey]) -> None:
        """Counts a use of each value: what LMCache serves from its memory stays here too."""
        self._store.submit_exists([one for key in keys for one in self._names(key)])
        self._notify_keys_accessed(keys)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Removes the values of the keys, durably, for all servers."""
        pairs = [(key, one) for key in keys for one in self._names(key)]
        removed = self._store.delete([one for _, one in pairs])
        # What another server has evicted or deleted before has gone too: LMCache would name it
        # again.
        digests = [forebay.object_digest(one) for _, one in pairs]
        gone = [yes or is_gone for yes, is_gone in zip(removed, self._store.gone(digests), strict=True)]
        self._forget(digest for digest, yes in zip(digests, gone, strict=True) if yes)
        if left := {key for (key, _), yes in zip(pairs, gone, strict=True) if not yes}:
            # Not raised: LMCache's thread that enforces quotas would end, for all of its adapters.
            self._quiet.warn("delete", "%d of %d keys could not be deleted", len(left), len(keys))

    def list_l2_keys(self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None) -> KeyListPage:
        """A page of the stored keys, of all servers, one for each value. Reads 4 KiB of the drive for each key that it looks at."""
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, got {page_size}")
        prefix = None if model_name is None else f"{model_name}@"
        try:
            found = self._store.list(prefix, page_size, None if cursor is None else bytes.fromhex(cursor))
        except forebay.ForebayError as error:
            # What LMCache answers with "not available", and with these words.
            raise NotImplementedError(f"Forebay cannot list its values: {error}") from error
        entries = []
        for text, length in found:
            if (known := encoded(text)) is not None:
                key, of = known
                self._seen(key, of)
                entries.append(KeyEntry(key, length))
        return KeyListPage(tuple(entries), found[-1][0].hex() if len(found) == page_size else None)

    def report_status(self) -> dict[str, Any]:
        """Whether values are served, why not, and the counters of `ObjectStore.stats`."""
        is_healthy = self._store.is_up and self._thread.is_alive()
        return {"is_healthy": is_healthy, "type": "forebay", "why_disabled": self._store.why_disabled, **self._store.stats()}

    def close(self) -> None:
        """Waits for tasks under way, makes what was stored durable, and closes."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        try:
            self._store.close()
        except forebay.ForebayError as error:
            # Not raised: LMCache would leave its other adapters open.
            logger.error("the cache could not be closed properly, what was stored at the end may be lost: %s", error)
        self._limit.close()
        os.close(self._stop)
        for notifier in self._wake.values():
            notifier.close()

    def _submit(self, submit: Callable[[Any], int], keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        names = [self._name(key, layout_of(value)) for key, value in zip(keys, objects, strict=True)]
        try:
            pairs = [(one, value.byte_array) for one, value in zip(names, objects, strict=True)]
        except NotImplementedError as error:
            raise forebay.Unsupported(
                "LMCache's L1 lies in GDS, whose values are not in host memory: start LMCache without --gds-l1-path"
            ) from error
        # The lock keeps the thread from a completion whose number is not known here yet.
        with self._lock:
            number = self._limit.of(submit(pairs))
            self._tasks[number] = list(zip(keys, names, strict=True))
        return number

    def _pin(self, names: list[str]) -> list[bool]:
        pinned = self._store.pin(names, PIN_S)
        # What cannot be kept is most probably still there when it is loaded, and a miss if not.
        return [yes or self._store.count_prefix([one]) == 1 for one, yes in zip(names, pinned, strict=True)]

    def _seen(self, key: ObjectKey | EncodedObjectKey, of: str) -> None:
        place = (key.model_name, key.kv_rank, key.object_group_id)
        with self._lock:
            self._layouts.setdefault(place, {""}).add(of)

    def _name(self, key: ObjectKey, of: str) -> str:
        """What a value of this layout is stored under."""
        self._seen(key, of)
        return name(key) + of

    def _names(self, key: ObjectKey) -> list[str]:
        """All that the value may be stored under, as far as is known here."""
        with self._lock:
            known = sorted(self._layouts.get((key.model_name, key.kv_rank, key.object_group_id), {""}))
        return [name(key) + of for of in known]

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._store.event_fd(), select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        looked = time.monotonic()
        while not any(descriptor == self._stop for descriptor, _ in poll.poll(TELL_MS)):
            for done in self._store.drain_completions():
                self._take(done)
            self._call_listeners(lambda: self._forget(self._store.drain_evicted()))
            if time.monotonic() - looked >= LOOK_S:
                self._call_listeners(self._look)
                looked = time.monotonic()

    @staticmethod
    def _call_listeners(call: Callable[[], None]) -> None:
        """Makes a call that notifies LMCache's listeners. One that raises must not end the thread:
        nothing would be answered any more."""
        try:
            call()
        except Exception:
            logger.exception("a listener of LMCache's has failed")

    def _take(self, done: forebay.Completion) -> None:
        with self._lock:
            pairs = self._tasks.pop(done.id, None)
        if pairs is None:
            # A touch, which has no result.
            return
        kind, took = ("store", self._took_store) if done.kind == "put" else ("load", self._took_load)
        if done.error is not None:
            cause = next((one for one in done.causes if one is not None), "")
            self._quiet.warn(f"{kind} {cause}", "a %s of %d keys: %s", kind, len(pairs), done.error)
        answer = L2StoreResult(done.error is None and all(done.results), sum(done.lengths)) if kind == "store" else bitmap(done.results, len(pairs))
        with self._lock:
            self._done[kind][done.id] = answer
        self._call_listeners(lambda: took(pairs, done))
        self._wake[kind].notify()

    def _took_store(self, pairs: list[tuple[ObjectKey, str]], done: forebay.Completion) -> None:
        stored = [(key, one, length) for (key, one), yes, length in zip(pairs, done.results, done.lengths, strict=False) if yes]
        told = {forebay.object_digest(one): (key, length) for key, one, length in stored}
        # 0: the value was there already, and the server that stored it counts it. Otherwise a value
        # that this server had stored before has gone since: another server, or this one a moment
        # ago, has evicted or deleted it. LMCache would count both.
        self._forget([digest for digest, (_, length) in told.items() if length > 0])
        with self._lock:
            for digest, value in told.items():
                self._stored.setdefault(digest, value)
        if stored:
            self._notify_keys_stored([key for key, _, _ in stored], [length for _, _, length in stored])

    def _took_load(self, pairs: list[tuple[ObjectKey, str]], done: forebay.Completion) -> None:
        if loaded := [key for (key, _), yes in zip(pairs, done.results, strict=False) if yes]:
            self._notify_keys_accessed(loaded)
        # Stored by a server with another `serde`: a store of the right value would leave it as it
        # is.
        wrong = [one for (_, one), cause in zip(pairs, done.causes, strict=False) if cause == "wrong_length"]
        if wrong:
            self._quiet.warn("wrong length", "%d values have another length than LMCache asks for, and are deleted; give each serde a `namespace` of its own", len(wrong))
            self._store.submit_delete(wrong)
            self._forget([forebay.object_digest(one) for one in wrong])
        # Not all of these: of what lies on a drive that does not answer nothing is found for a
        # while.
        self._forget_gone([forebay.object_digest(one) for (_, one), yes in zip(pairs, done.results, strict=False) if not yes])

    def _look(self) -> None:
        """Notifies LMCache of what other servers have evicted or deleted. A lookup that misses it does not come to a load."""
        with self._lock:
            known = list(self._stored)
        self._forget_gone(known)

    def _forget_gone(self, digests: list[bytes]) -> None:
        """Notifies LMCache of those of these values that are gone."""
        gone = self._store.gone(digests)
        self._forget(digest for digest, is_gone in zip(digests, gone, strict=True) if is_gone)

    def _forget(self, digests: Iterable[bytes]) -> None:
        """Notifies LMCache that these values are gone."""
        with self._lock:
            gone = [known for digest in digests if (known := self._stored.pop(digest, None)) is not None]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [length for _, length in gone])


def common_dtype(objects: list[MemoryObj]) -> Any:
    """Element type of all values; None where they have several. Values may be coded by it, and are
    the same to the last bit in any case."""
    types = {dtype for value in objects for dtype in value.metadata.dtypes or [value.metadata.dtype]}
    return types.pop() if len(types) == 1 else None


def layout(shapes: Iterable[Any], dtypes: Iterable[Any]) -> str:
    """What tells values of these shapes and element types from others of the same key: it follows the key in their names. Nothing for mere
    bytes, such as those of a `serde`. The slash cannot be part of what a key ends with, a `cache_salt` or a hash."""
    parts = [(tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    if all(len(shape) <= 1 for shape, _ in parts):
        return ""
    text = " ".join(f"{dtype}{shape}" for shape, dtype in parts)
    return f"/{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def layout_of(value: MemoryObj) -> str:
    """The layout of a value that LMCache stores, or of a buffer that is to be filled."""
    metadata = value.metadata
    return layout(metadata.shapes or [metadata.shape], metadata.dtypes or [metadata.dtype])


def name(key: ObjectKey) -> str:
    """What mere bytes are stored under: LMCache's own text for a key, the one that `native_plugin` is given. A layout may follow."""
    salt = f"@{key.cache_salt}" if key.cache_salt else ""
    return f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}{salt}"


def encoded(text: bytes) -> tuple[EncodedObjectKey, str] | None:
    """The key and the layout that a name was made of; None for an object that is not LMCache's."""
    try:
        *parts, last = text.decode().split("@")
        last, slash, of = last.partition("/")
        model, rank, group, digest, *salt = [*parts, last]
        return EncodedObjectKey(digest, model, int(rank, 16), int(group, 16), salt[0] if salt else ""), slash + of
    except ValueError:
        return None


def bitmap(answers: list[bool], length: int | None = None) -> Bitmap:
    """Answers as LMCache's `Bitmap`; a key without an answer is a no."""
    made = Bitmap(len(answers) if length is None else length)
    for place, yes in enumerate(answers):
        if yes:
            made.set(place)
    return made
