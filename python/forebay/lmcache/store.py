"""The object store that `Adapter` and `Connector` use, and how long they use LMCache's memory."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from typing import Any

import forebay
from forebay._quiet import Quiet

logger = logging.getLogger("forebay.lmcache")

#: The longest that a put or a get uses LMCache's memory, in seconds. LMCache's locks on it expire
#: (`--l1-read-ttl-seconds`, `--l1-write-ttl-seconds`), and then it may give that memory to other
#: chunks, whether it was answered or not.
MEMORY_S = 120.0
#: How often is looked for batches whose time is over, in seconds.
LOOK_S = 1.0


def open_store(namespace: str = "default", **settings: Any) -> forebay.ObjectStore:
    """LMCache's values as objects in the cache directories of `settings`, under LMCache's own keys.

    `namespace` separates servers that must not see each other's values, such as two versions of a model under one name, or two
    KV types: LMCache's keys have the model's name, the ranks and the tokens. All other arguments are Forebay's settings
    (docs/configuration.md).
    """
    if "max_capacity_gb" in settings or "eviction" in settings:
        raise forebay.ConfigError(
            "max_capacity_gb and eviction are not Forebay's: say `capacity` in adapter_params; Forebay evicts by itself"
        )
    if not isinstance(namespace, str) or not namespace:
        raise forebay.ConfigError(f"namespace is {namespace!r}: give a text, such as the model's name and version, or leave it out")
    return forebay.ObjectStore(settings or None, namespace=f"lmcache/{namespace}")


class TimeLimit:
    """Ends batches that have had LMCache's memory for `MEMORY_S`: nothing of it is read or written for them any more. Memory that is
    registered the kernel may use on; such a batch is answered when it has let go."""

    def __init__(self, store: forebay.ObjectStore) -> None:
        """Of this store's batches."""
        # A store that nobody closes is closed when it goes.
        self._store, self._begun, self._quiet = weakref.ref(store), deque[tuple[float, int]](), Quiet(logger)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forebay-limit", daemon=True)
        self._thread.start()

    def of(self, batch: int) -> int:
        """The batch, which has begun now."""
        self._begun.append((time.monotonic(), batch))
        return batch

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S) and self._store() is not None:
            while self._begun and time.monotonic() - self._begun[0][0] >= MEMORY_S:
                # Nearly all have ended long before.
                store, (_, batch) = self._store(), self._begun.popleft()
                if store is not None and store.cancel(batch):
                    self._quiet.warn("late", "a load or a store was ended, as it took %g s: the drive is too slow, or hangs", MEMORY_S)
                # A store that nobody closes is closed when it goes.
                del store

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()
