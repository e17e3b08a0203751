"""Jobs and lookups of the tier alone, without vLLM."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import forebay
import pytest
from forebay.vllm.tier_jobs import Lookups, Outcome, Rows, Transfers

ROW = 4096
COUNT = 4


def settle(transfers: Transfers) -> list[Outcome]:
    transfers.drain()
    return transfers.poll()


def opened(folder: Path) -> tuple[Transfers, ctypes.Array, forebay.ObjectStore]:
    memory = (ctypes.c_ubyte * (ROW * COUNT))()
    store = forebay.ObjectStore({"gds_config": {"cache_dir": str(folder)}, "capacity": "256MiB", "min_free": 0})
    return Transfers(store, Rows(ctypes.addressof(memory), COUNT, ROW), 2000, False), memory, store


def test_a_failed_load_outranks_an_older_answer() -> None:
    lookups = Lookups()
    assert lookups.ask(b"a", "first") is None
    asked = lookups.take_new()
    lookups.learn([b"a"], False)
    lookups.answer(asked, [True])
    assert lookups.ask(b"a", "second") is False
    lookups.learn([b"a"], True)
    assert lookups.ask(b"a", "second") is True


def test_a_key_is_asked_once_and_kept_for_its_requests() -> None:
    lookups = Lookups()
    for request in ("first", "second", "first"):
        assert lookups.ask(b"a", request) is None
    assert lookups.take_new() == [b"a"]
    assert lookups.take_new() == []
    lookups.answer([b"a"], [True])
    lookups.forget("first")
    assert lookups.ask(b"a", "second") is True
    lookups.forget("second")
    lookups.forget("unknown")
    assert len(lookups) == 0
    # An answer to a question of a request that is gone is not kept.
    lookups.answer([b"a"], [True])
    assert len(lookups) == 0


def test_an_object_of_another_length_is_a_failure(tmp_path: Path) -> None:
    transfers, memory, store = opened(tmp_path)
    store.put({b"short": b"x" * (ROW - 1), b"long": b"x" * (ROW + 1), b"right": b"y" * ROW})
    transfers.load(1, [b"short", b"long", b"right"], [0, 1, 2])
    [outcome] = settle(transfers)
    assert (outcome.success, outcome.succeeded) == (False, (b"right",))
    assert bytes(memory[2 * ROW : 3 * ROW]) == b"y" * ROW
    transfers.close(1000)


def test_rows_outside_the_memory_fail_the_job(tmp_path: Path) -> None:
    transfers, _memory, store = opened(tmp_path)
    store.put({b"a": b"x" * ROW})
    transfers.load(1, [b"a"], [COUNT])
    transfers.save(2, [b"b"], [-1])
    assert [(o.job, o.success) for o in settle(transfers)] == [(1, False), (2, False)]
    assert store.exists([b"b"]) == [False]
    transfers.close(1000)


def test_a_closed_store_fails_jobs_and_finds_nothing(tmp_path: Path) -> None:
    transfers, _memory, store = opened(tmp_path)
    store.close()
    transfers.load(1, [b"a"], [0])
    transfers.save(2, [b"a"], [0])
    assert transfers.lookups.ask(b"a", "request") is None
    transfers.flush_lookups()
    assert sorted((o.job, o.success) for o in settle(transfers)) == [(1, False), (2, False)]
    assert transfers.lookups.ask(b"a", "request") is False


def test_a_drained_tier_touches_no_memory(tmp_path: Path) -> None:
    transfers, memory, _store = opened(tmp_path)
    for number in range(COUNT):
        ctypes.memset(ctypes.addressof(memory) + number * ROW, number + 1, ROW)
    transfers.save(1, [b"%d" % n for n in range(COUNT)], list(range(COUNT)))
    transfers.drain()
    assert transfers._jobs == 0
    assert [o.success for o in transfers.poll()] == [True]
    ctypes.memset(memory, 0, ROW * COUNT)
    transfers.load(2, [b"3", b"0"], [0, 1])
    [outcome] = settle(transfers)
    assert outcome.success
    assert bytes(memory[:ROW]) == b"\4" * ROW
    assert bytes(memory[ROW : 2 * ROW]) == b"\1" * ROW
    transfers.close(1000)


class Mute:
    """A store that takes work and then gives no answers."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0)

    def event_fd(self) -> int:
        return self._fd

    def submit_exists(self, _keys: Any) -> int:
        return 1

    def drain_completions(self) -> list[Any]:
        raise forebay.ForebayError("gone")


def test_a_store_that_gives_no_answers_is_not_waited_for() -> None:
    store: Any = Mute()
    transfers = Transfers(store, Rows(0, COUNT, ROW), 2000, False)
    transfers.save(1, [b"a"], [0])
    assert transfers.poll() == []
    with pytest.raises(forebay.ForebayError, match="gone"):
        transfers.drain()


def test_a_close_that_fails_is_told_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store: Any = Mute()
    transfers = Transfers(store, Rows(0, COUNT, ROW), 2000, False)
    transfers.save(1, [b"a"], [0])
    closed: list[int] = []
    store.close = closed.append
    transfers.close(1000)
    assert closed == [500], "closed although it could not be drained"
    assert "could not be drained" in caplog.text


def test_a_close_cancels_what_has_not_ended_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now, cancelled = 1000.0, list[int]()

    class Hung(Mute):
        def drain_completions(self) -> list[Any]:
            # Each look takes a second.
            nonlocal now
            now += 1
            if now > 1100:
                raise AssertionError("it waits on")
            return [forebay.Completion(one, "exists", [False], [0], ["cancelled"], None) for one in cancelled]

        def cancel(self, batch: int) -> bool:
            cancelled.append(batch)
            return True

        def submit_put(self, _items: Any, dtype: Any = None) -> int:
            return 2

        def close(self, timeout_ms: int) -> None:
            cancelled.append(-timeout_ms)

    monkeypatch.setattr("forebay.vllm.tier_jobs.time.monotonic", lambda: now)
    store: Any = Hung()
    transfers = Transfers(store, Rows(0, COUNT, ROW), 2000, False)
    transfers.save(1, [b"a"], [0])
    transfers.close(30_000)
    assert cancelled == [1, 2, -15_000], "the question, and then the put that followed its answer"
    assert 1015 <= now <= 1020


def test_a_failure_is_told_again_after_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Mute()
    transfers = Transfers(store, Rows(0, COUNT, ROW), 2000, False)
    now = 1000.0
    monkeypatch.setattr("forebay._quiet.time.monotonic", lambda: now)
    told = []
    for later in (0, 59, 2, 1, 60):
        now += later
        transfers.poll()
        told.append(len(caplog.records))
    assert told == [1, 1, 2, 2, 3]
