"""Blocks of vLLM's CPU tier on their way to and from the object store: jobs, lookups, time limits.

One thread calls, vLLM's scheduler; nothing here waits but `drain` and `close`. Batches are submitted and their completions taken
in `poll`, so a job moves on at most once per call. No vLLM in here.

Invariants:
- A row is read or written only between the submit of its job and that job's outcome.
- A key whose load failed is a miss to every request that had asked for it, until it is stored again: vLLM would try for ever.
- A block that the store has already is not written again.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import forebay
from forebay._quiet import Quiet

logger = logging.getLogger("vllm.forebay")

#: Seconds after which `drain` cancels the batches that have not ended, unless the caller has less
#: time.
DRAIN_PATIENCE_S = 60.0
#: Causes that are not logged: a cache may drop any object, so a miss is no failure.
QUIET_CAUSES = frozenset({"not_found", None})


@dataclass(frozen=True)
class Rows:
    """The memory that jobs name by row: `count` rows of `row_bytes` bytes each, one after the other, kept alive by the caller."""

    address: int
    count: int
    row_bytes: int

    def buffer(self, row: int) -> tuple[int, tuple[int], None, int, str]:
        """One row as the object store takes memory: neither a copy nor an export that would keep it from being freed."""
        if not 0 <= row < self.count:
            raise IndexError(f"row {row} of {self.count}")
        return (self.address + row * self.row_bytes, (self.row_bytes,), None, 1, "cpu")


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    job: int
    is_load: bool
    keys: tuple[bytes, ...]
    succeeded: tuple[bytes, ...]
    """The keys that are stored, or whose rows hold their bytes."""
    seconds: float
    moved_bytes: int

    @property
    def success(self) -> bool:
        """Whether all keys succeeded."""
        return len(self.succeeded) == len(self.keys)


@dataclass
class _Job:
    number: int
    is_load: bool
    keys: tuple[bytes, ...]
    rows: dict[bytes, int]
    began: float = field(default_factory=time.monotonic)
    present: set[bytes] = field(default_factory=set)
    """Keys to be stored that the store has already."""


Answer = Callable[[Any], None]


class Lookups:
    """What is known of the keys that live requests have asked for. An answer is kept until no
    request that has asked for its key lives."""

    def __init__(self) -> None:
        """Empty."""
        self._known: dict[bytes, bool | None] = {}
        self._holders: dict[bytes, set[str]] = {}
        self._keys_of: dict[str, set[bytes]] = {}
        self._new: list[bytes] = []

    def ask(self, key: bytes, request: str) -> bool | None:
        """Whether `key` is stored; None where that is not known yet."""
        if key not in self._known:
            self._known[key] = None
            self._new.append(key)
        self._holders.setdefault(key, set()).add(request)
        self._keys_of.setdefault(request, set()).add(key)
        return self._known[key]

    def take_new(self) -> list[bytes]:
        """The keys to ask the store for."""
        new = [key for key in dict.fromkeys(self._new) if self._known.get(key, True) is None]
        self._new = []
        return new

    def answer(self, keys: Iterable[bytes], found: Iterable[bool]) -> None:
        """The store's answers. They do not replace what a load or a store has found since."""
        for key, is_there in zip(keys, found):
            if self._known.get(key, False) is None:
                self._known[key] = is_there

    def learn(self, keys: Iterable[bytes], is_there: bool) -> None:
        """What a load or a store has found out."""
        for key in keys:
            if key in self._known:
                self._known[key] = is_there

    def forget(self, request: str) -> None:
        """Ends a request."""
        for key in self._keys_of.pop(request, ()):
            holders = self._holders[key]
            holders.discard(request)
            if not holders:
                del self._holders[key], self._known[key]

    def __len__(self) -> int:
        """Keys that are held."""
        return len(self._known)


class Transfers:
    """Jobs between rows of memory and the object store."""

    def __init__(
        self, store: forebay.ObjectStore, rows: Rows, load_timeout_ms: int, read_only: bool, dtype: str | None = None
    ) -> None:
        """Over an open store, which `close` closes; `dtype` is the element type of the rows."""
        self.lookups = Lookups()
        self._store, self._rows, self._dtype = store, rows, dtype
        self._timeout_s, self._read_only = load_timeout_ms / 1000, read_only
        self._waiting: dict[int, Answer] = {}
        self._loads: dict[int, float] = {}
        self._done: list[Outcome] = []
        self._jobs = 0
        self._rests = False
        self._quiet = Quiet(logger)

    def load(self, number: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Begins to fill rows with the blocks of `keys`."""
        job = self._begin(number, True, keys, rows)
        batch = None
        if not self._rests:
            batch = self._submit(lambda: self._store.submit_get({k: self._rows.buffer(r) for k, r in job.rows.items()}))
        if batch is None:
            self._end(job, (), 0)
            return
        self._loads[batch] = job.began + self._timeout_s
        self._waiting[batch] = lambda completion: self._loaded(job, completion)

    def save(self, number: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Begins to store rows under `keys`, but for those that are stored."""
        job = self._begin(number, False, keys, rows)
        if not self.stores:
            # No failure: the settings or the reset want nothing stored.
            self._end(job, job.keys, 0)
            return
        batch = self._submit(lambda: self._store.submit_exists(job.keys))
        if batch is None:
            self._end(job, (), 0)
        else:
            self._waiting[batch] = lambda completion: self._asked(job, completion)

    def flush_lookups(self) -> None:
        """Asks the store for the keys that came up since the last time, in one batch."""
        new = self.lookups.take_new()
        if not new:
            return
        batch = self._submit(lambda: self._store.submit_exists(new))
        if batch is None:
            self.lookups.answer(new, [False] * len(new))
        else:
            self._waiting[batch] = lambda completion: self.lookups.answer(new, completion.results)

    def poll(self) -> list[Outcome]:
        """Takes what has ended, moves jobs on, ends loads that are late; the jobs that are over since the last call."""
        try:
            self._advance()
        except forebay.ForebayError as error:
            self._complain(type(error).__name__, f"the cache gives no answers: {error}")
        done, self._done = self._done, []
        return done

    def drain(self, patience_s: float = DRAIN_PATIENCE_S) -> None:
        """Waits until no job is under way: nothing reads or writes a row when this returns. Outcomes are for the next `poll`.
        After `patience_s` batches are cancelled, which ends them at once: the kernel never has the rows.

        Raises what the store raises: one that gives no answers could never say that its work is over.
        """
        until = time.monotonic() + patience_s
        ready = select.poll()
        ready.register(self._store.event_fd(), select.POLLIN)
        while self._jobs:
            ready.poll(50)
            if time.monotonic() > until:
                for batch in list(self._waiting):
                    self._store.cancel(batch)
            self._advance()

    def rest(self) -> None:
        """From here on nothing is stored or loaded."""
        self._rests = True

    @property
    def rests(self) -> bool:
        """Whether nothing is stored or loaded any more."""
        return self._rests

    @property
    def stores(self) -> bool:
        """Whether blocks are stored; otherwise jobs that should store some succeed and do nothing."""
        return not (self._read_only or self._rests)

    def close(self, timeout_ms: int) -> None:
        """Lets batches end for half of `timeout_ms`, and has the other half to make durable what is stored, and to close.
        Raises nothing: the server's end goes on."""
        for what, end in (("drained", lambda: self.drain(timeout_ms / 2000)), ("closed", lambda: self._store.close(timeout_ms // 2))):
            try:
                end()
            except Exception as error:  # noqa: BLE001
                logger.warning("tier: the cache could not be %s, what was being stored at the end is lost: %s", what, error)

    def _begin(self, number: int, is_load: bool, keys: Sequence[bytes], rows: Sequence[int]) -> _Job:
        keys = tuple(bytes(key) for key in keys)
        if len(keys) != len(rows):
            raise ValueError(f"job {number}: {len(keys)} keys and {len(rows)} rows")
        self._jobs += 1
        return _Job(number, is_load, keys, {key: int(row) for key, row in zip(keys, rows)})

    def _submit(self, call: Callable[[], int]) -> int | None:
        try:
            return call()
        except (forebay.ForebayError, IndexError) as error:
            self._complain(type(error).__name__, f"the cache takes no work: {error}")
            return None

    def _advance(self) -> None:
        self._take()
        now = time.monotonic()
        late = [batch for batch, until in self._loads.items() if until <= now]
        for batch in late:
            self._store.cancel(batch)
        if late:
            self._complain("timed out", f"{len(late)} loads took longer than load_timeout_ms; their blocks are computed")
            self._take()

    def _take(self) -> None:
        for completion in self._store.drain_completions():
            self._loads.pop(completion.id, None)
            then = self._waiting.pop(completion.id, None)
            if then is not None:
                then(completion)

    def _asked(self, job: _Job, completion: Any) -> None:
        job.present = {key for key, found in zip(job.keys, completion.results) if found}
        missing = {key: row for key, row in job.rows.items() if key not in job.present}
        if not missing:
            self._end(job, job.keys, 0)
            return

        def put() -> int:
            return self._store.submit_put({k: self._rows.buffer(r) for k, r in missing.items()}, dtype=self._dtype)

        batch = self._submit(put)
        if batch is None:
            self._end(job, tuple(job.present), 0)
        else:
            self._waiting[batch] = lambda put: self._saved(job, tuple(missing), put)

    def _saved(self, job: _Job, keys: tuple[bytes, ...], completion: Any) -> None:
        self._explain("stored", completion)
        stored = [key for key, ok in zip(keys, completion.results) if ok]
        self._end(job, (*job.present, *stored), len(stored))

    def _loaded(self, job: _Job, completion: Any) -> None:
        self._explain("loaded", completion)
        whole = (ok and n == self._rows.row_bytes for ok, n in zip(completion.results, completion.lengths))
        # The batch was submitted in the order of `rows`, which has each key once.
        loaded = tuple(key for key, ok in zip(job.rows, whole) if ok)
        self._end(job, loaded, len(loaded))

    def _end(self, job: _Job, succeeded: tuple[bytes, ...], moved: int) -> None:
        self._jobs -= 1
        held = set(succeeded)
        if job.is_load:
            self.lookups.learn((key for key in job.keys if key not in held), False)
        elif self.stores:
            self.lookups.learn(held, True)
        seconds = time.monotonic() - job.began
        ordered = tuple(key for key in job.keys if key in held)
        self._done.append(Outcome(job.number, job.is_load, job.keys, ordered, seconds, moved * self._rows.row_bytes))

    def _explain(self, what: str, completion: Any) -> None:
        for cause in set(completion.causes) - QUIET_CAUSES:
            number = completion.causes.count(cause)
            self._complain(f"{what} {cause}", f"{number} blocks could not be {what} ({cause}): {completion.error}")

    def _complain(self, kind: str, message: str) -> None:
        # A full or broken drive would fill the log.
        self._quiet.warn(kind, "tier: %s", message)
