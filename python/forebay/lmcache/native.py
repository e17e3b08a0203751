"""LMCache's door: the connector class that LMCache's `native_plugin` L2 adapter makes.

Start LMCache's server with (docs/lmcache.md):

    lmcache server … --l2-adapter '{"type": "native_plugin", "module_path": "forebay.lmcache",
      "class_name": "Connector", "adapter_params": {"cache_dir": "/mnt/nvme/forebay", "capacity": "200GiB"}}'

LMCache calls the `submit_batch_*` methods under a lock of its own, so none of them waits or raises: what cannot be done is a
completion that says no. It polls `event_fd` and takes `drain_completions`.

Invariants:
- A get fills the whole buffer with verified bytes, or is answered with no. A buffer of another length than the value is a no.
- A buffer is held until its batch has been answered.
- Capacity and eviction are the store's: what LMCache's `max_capacity_gb` and `eviction` would count is one process's only.

This module knows nothing of LMCache's packages: it can be imported without them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import forebay

logger = logging.getLogger("forebay.lmcache")

#: What a completion is for LMCache: the batch's number, whether it went well, the first failure in words, an answer for each key.
Answer = tuple[int, bool, str, list[bool] | None]


class Connector:
    """LMCache's values as objects in the cache directories of `settings`, under LMCache's own keys.

    `namespace` separates servers that must not see each other's values, such as two versions of a model under one name; LMCache's
    keys have the model's name, the ranks and the layout. All other arguments are Forebay's settings (docs/configuration.md).
    """

    def __init__(self, namespace: str = "default", **settings: Any) -> None:
        if "max_capacity_gb" in settings or "eviction" in settings:
            raise forebay.ConfigError(
                "max_capacity_gb and eviction are not Forebay's: say `capacity` in adapter_params; Forebay evicts by itself"
            )
        self._store = forebay.ObjectStore(settings or None, namespace=f"lmcache/{namespace}")
        # Batches that the store did not take, by the number of an empty batch that stands for each: why, and how many keys.
        self._refused: dict[int, tuple[str, int]] = {}
        self._lock = threading.Lock()

    def event_fd(self) -> int:
        """Readable while there are completions to take."""
        return self._store.event_fd()

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Stores each value under its key. A key that is stored already stays as it is, and is a yes."""
        return self._submit(lambda: self._store.submit_put(self._pairs(keys, memoryviews)), len(keys))

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Fills each buffer with the value of its key."""
        return self._submit(lambda: self._store.submit_get(self._pairs(keys, memoryviews)), len(keys))

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Asks which keys are stored. No I/O."""
        return self._submit(lambda: self._store.submit_exists(keys), len(keys))

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Removes the values of the keys, durably."""
        return self._submit(lambda: self._store.submit_delete(keys), len(keys))

    def drain_completions(self) -> list[Answer]:
        """The batches that have ended since the last call."""
        with self._lock:
            return [self._answer(done) for done in self._store.drain_completions()]

    def close(self) -> None:
        """Waits for batches under way, makes what was stored durable, and closes."""
        self._store.close()

    def _answer(self, done: forebay.Completion) -> Answer:
        if done.id in self._refused:
            why, count = self._refused.pop(done.id)
            return done.id, False, why, [False] * count
        # A key that is not there is an answer to these, not a failure of the batch.
        is_question = done.kind in ("exists", "delete")
        return done.id, is_question or all(done.results), done.error or "", done.results

    def _submit(self, submit: Callable[[], int], count: int) -> int:
        with self._lock:
            try:
                return submit()
            except (forebay.ForebayError, TypeError, ValueError) as error:
                logger.warning("a batch of %d keys was not taken: %s", count, error)
                number = self._store.submit_exists([])
                self._refused[number] = (str(error), count)
                return number

    @staticmethod
    def _pairs(keys: Sequence[str], memoryviews: Sequence[memoryview]) -> list[tuple[str, memoryview]]:
        return list(zip(keys, memoryviews, strict=True))
