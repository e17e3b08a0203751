"""The connector class that LMCache's `native_plugin` L2 adapter makes.

LMCache calls the `submit_batch_*` methods under a lock of its own, so none of them waits or raises: what cannot be done is a completion
that says no. It polls `event_fd` and takes `drain_completions`.

Invariants:
- A get fills the whole buffer with verified bytes, or is answered with no. A buffer of another length than the value is a no.
- A buffer is held until its batch has been answered, and is not used for longer than `store.MEMORY_S`.
- Capacity and eviction are the store's: what LMCache's `max_capacity_gb` and `eviction` would count is one process's only.

This module knows nothing of LMCache's packages: it can be imported without them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import forebay
from forebay.lmcache.store import TimeLimit, open_store

logger = logging.getLogger("forebay.lmcache")

#: Element types that LMCache's values may have, in torch's words. Values of the first may be coded.
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8")
#: What a completion is for LMCache: the batch's number, whether it went well, the first failure in
#: words, an answer for each key.
Answer = tuple[int, bool, str, list[bool]]


class Connector:
    """LMCache's values as objects; the arguments are those of `open_store`, and `dtype`, that of the
    values, which LMCache does not tell here."""

    def __init__(self, dtype: str | None = None, **params: Any) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise forebay.ConfigError(f"dtype is {dtype!r}: give the element type of the values, one of {', '.join(DTYPES)}, or leave it out")
        self._store, self._dtype = open_store(**params), dtype
        self._limit = TimeLimit(self._store)

    def event_fd(self) -> int:
        """Readable while there are completions to take."""
        return self._store.event_fd()

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Stores each value under its key. A key that is stored already stays as it is, and is a yes."""
        return self._limit.of(self._store.submit_put(zip(keys, memoryviews, strict=True), dtype=self._dtype))

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Fills each buffer with the value of its key."""
        return self._limit.of(self._store.submit_get(zip(keys, memoryviews, strict=True)))

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Asks which keys are stored. No I/O."""
        return self._store.submit_exists(keys)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Removes the values of the keys, durably."""
        return self._store.submit_delete(keys)

    def drain_completions(self) -> list[Answer]:
        """The batches that have ended since the last call."""
        return [self._answer(done) for done in self._store.drain_completions()]

    def close(self) -> None:
        """Waits for batches under way, makes what was stored durable, and closes."""
        try:
            self._store.close()
        except forebay.ForebayError as error:
            # Not raised: LMCache would leave its other adapters open.
            logger.error("the cache could not be closed properly, what was stored at the end may be lost: %s", error)
        self._limit.close()

    @staticmethod
    def _answer(done: forebay.Completion) -> Answer:
        # A key that is not there is an answer to these, not a failure of the batch.
        is_question = done.kind in ("exists", "delete")
        return done.id, done.error is None and (is_question or all(done.results)), done.error or "", done.results
