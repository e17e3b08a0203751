"""Objects: round trips, misses, values that change, buffers that are refused, batches by descriptor."""

from __future__ import annotations

import logging
import select
import sys
import threading
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import config

import forebay


@pytest.fixture
def objs(cache: Path) -> Any:
    with forebay.ObjectStore(config(cache)) as store:
        assert store.is_up
        yield store


def test_objects_come_back(objs: forebay.ObjectStore) -> None:
    big = np.random.default_rng(5).integers(0, 255, 300_000, dtype=np.uint8)
    assert objs.put({"a": b"hello", b"b": array("i", [1, 2, 3]), "big": big}) == [True, True, True]
    a, b, out = bytearray(5), array("i", [0, 0, 0]), np.zeros_like(big)
    assert objs.get({"a": a, "b": b, "big": out, "none": bytearray(1)}) == [True, True, True, False]
    assert (a, b.tolist()) == (b"hello", [1, 2, 3]) and np.array_equal(big, out)
    assert objs.exists(["a", "x"]) == [True, False]
    assert objs.put({"a": b"other"}) == [True]
    assert objs.get({"a": a}) == [True] and a == b"hello"
    assert objs.delete(["a"]) == [True] and objs.put({"a": b"other"}) == [True]
    assert objs.get({"a": a}) == [True] and a == b"other"
    assert objs.delete(["a", "x"]) == [True, False]
    assert objs.exists(["a"]) == [False]
    objs.flush()
    stats = objs.stats()
    assert (stats["put"]["ok"], stats["already_there"]) == (5, 1) and stats["get"]["no"] == {"not_found": 1}
    assert "forebay_objects_up 1" in objs.metrics()


@pytest.mark.parametrize(("dtype", "is_coded"), [("bfloat16", True), ("torch.bfloat16", True), ("float16", False), (None, False)])
def test_values_of_bfloat16_take_less_space_and_come_back(cache: Path, dtype: str | None, is_coded: bool) -> None:
    wide = np.random.default_rng(5).normal(size=1 << 20).astype(np.float32)
    value = (wide.view(np.uint32) >> 16).astype(np.uint16)
    with forebay.ObjectStore(config(cache) | {"codec": "exp4"}) as store:
        assert store.put({"a": [value[:300_001], value[300_001:]]}, dtype=dtype) == [True]
        assert (store.stats()["live_bytes"] < value.nbytes * 0.77) == is_coded
        out = np.zeros_like(value)
        assert store.get({"a": out}) == [True] and np.array_equal(out, value)
        assert "forebay_object_codec_misfits_total 0" in store.metrics()


def test_settings_without_effect_are_told(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    from forebay import _logging

    caplog.set_level(logging.WARNING, logger="forebay")
    with forebay.ObjectStore(config(cache) | {"local_cpu": True, "remote_url": f"file://{cache}/store"}):
        pass
    _logging.flush()
    assert all(f"{key} has no effect on objects" in caplog.text for key in ("local_cpu", "remote_url"))


def test_the_capacity_may_stand_beside_the_directory(cache: Path) -> None:
    settings = config(cache)
    settings["gds_config"]["capacity"] = settings.pop("capacity")
    with forebay.ObjectStore(settings) as store:
        assert store.put({"a": b"hello"}) == [True]


def test_buffers_that_do_not_do(objs: forebay.ObjectStore) -> None:
    objs.put({"a": b"12345"})
    with pytest.raises(forebay.InvalidInput, match="read-only"):
        objs.get({"a": b"12345"})
    with pytest.raises(forebay.InvalidInput, match="gaps"):
        objs.put({"a": np.zeros((4, 4))[:, 0]})
    with pytest.raises(forebay.InvalidInput, match="list of keys"):
        objs.exists("a")
    assert objs.put({"": b"x", "empty": b""}) == [False, False]
    assert objs.get({"a": bytearray(3)}) == [False]


def test_a_buffer_is_let_go_without_another_call(objs: forebay.ObjectStore) -> None:
    class Buffer(bytearray):
        """Can be referred to weakly."""

    objs.put({"a": b"12345"})
    for _ in range(40):
        buffer, gone = Buffer(5), threading.Event()
        ref = weakref.ref(buffer, lambda _: gone.set())  # noqa: B023
        assert objs.get({"a": buffer}) == [True]
        del buffer
        assert gone.wait(30), ref


def test_batches_end_on_a_descriptor(objs: forebay.ObjectStore) -> None:
    put = objs.submit_put({"k": b"value"})
    done: list[forebay.Completion] = []
    poll = select.poll()
    poll.register(objs.event_fd(), select.POLLIN)
    while not done:
        assert poll.poll(30_000)
        done = objs.drain_completions()
    assert done == [(put, "put", [True], [5], [None], None)]
    short = bytearray(2)
    objs.submit_get({"k": short, "none": bytearray(1)})
    assert poll.poll(30_000)
    (got,) = objs.drain_completions()
    assert got.results == [False, False] and got.lengths[0] == 5 and got.causes == ["wrong_length", "not_found"]
    assert objs.cancel(got.id) is False


def test_a_thread_that_drains_takes_nothing_from_a_call_that_waits(objs: forebay.ObjectStore) -> None:
    stop, drained = threading.Event(), list[forebay.Completion]()

    def drain() -> None:
        while not stop.is_set():
            drained.extend(objs.drain_completions())

    thread = threading.Thread(target=drain)
    thread.start()
    try:
        for i in range(300):
            assert objs.put({f"k{i}": b"value"}) == [True] and objs.exists([f"k{i}"]) == [True]
            assert objs.delete([f"k{i}"]) == [True]
    finally:
        stop.set()
        thread.join()
    assert drained == []


def test_a_thread_that_drains_knows_every_batch_of_the_thread_that_submits(objs: forebay.ObjectStore) -> None:
    # As docs/objects.md says: submitted and noted under a lock, which is taken before an id is
    # looked up.
    rounds, lock, noted, kinds = 2000, threading.Lock(), dict[int, str](), ("put", "get", "exists", "exists")
    drained, unknown = list[int](), list[forebay.Completion]()

    def drain() -> None:
        poll = select.poll()
        poll.register(objs.event_fd(), select.POLLIN)
        while len(drained) < rounds * len(kinds) and poll.poll(30_000):
            for done in objs.drain_completions():
                with lock:
                    kind = noted.get(done.id)
                drained.append(done.id)
                if kind != done.kind:
                    unknown.append(done)

    thread, interval = threading.Thread(target=drain), sys.getswitchinterval()
    # Threads take turns as often as they can: also between a submit's answer and its note.
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for i in range(rounds):
            keys = [f"k{i}"]
            # The last is invalid, and so answered before its submit returns.
            submits = (
                lambda: objs.submit_put({keys[0]: b"value"}),  # noqa: B023
                lambda: objs.submit_get({keys[0]: bytearray(5)}),  # noqa: B023
                lambda: objs.submit_exists(keys),  # noqa: B023
                lambda: objs.submit_exists(keys[0]),  # noqa: B023
            )
            for kind, submit in zip(kinds, submits, strict=True):
                with lock:
                    noted[submit()] = kind
    finally:
        thread.join()
        sys.setswitchinterval(interval)
    assert unknown == [] and len(noted) == rounds * len(kinds) and sorted(drained) == sorted(noted)


def test_a_submit_answers_for_what_it_cannot_do(cache: Path) -> None:
    store = forebay.ObjectStore(config(cache))
    gaps = np.zeros((4, 4))[:, 0]
    submits = [
        (store.submit_get({"a": b"1", "b": bytearray(1)}), "get", 2, "read-only"),
        (store.submit_get(iter([("a", bytearray(1)), ("b", b"1")])), "get", 2, "read-only"),
        (store.submit_exists(word[5] for word in ("long enough", "short", "")), "exists", 0, "index out of range"),
        (store.submit_put({"a": gaps}), "put", 1, "gaps"),
        (store.submit_put({"a": b"1"}, ttl_s=-1), "put", 1, "ttl_s"),
        (store.submit_exists("a"), "exists", 1, "list of keys"),
        (store.submit_delete(5), "delete", 0, "iterable"),  # type: ignore[arg-type]
        (store.submit_get([("k",)]), "get", 1, "length"),  # type: ignore[list-item]
    ]

    def interrupted() -> Iterator[bytes]:
        yield b"a"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.submit_exists(interrupted())
    answers = {c.id: c for c in store.drain_completions()}
    assert len(answers) == len(submits)
    for number, kind, count, why in submits:
        done = answers[number]
        assert (done.kind, done.results, done.causes) == (kind, [False] * count, ["invalid"] * count)
        assert done.error and why in done.error, done.error
    store.close()
    late = store.submit_put({"a": b"1"})
    (done,) = store.drain_completions()
    assert (done.id, done.results, done.causes) == (late, [False], ["closed"])


def test_a_value_may_lie_in_several_buffers(objs: forebay.ObjectStore) -> None:
    whole = np.random.default_rng(6).integers(0, 255, 100_000, dtype=np.uint8)
    assert objs.put({"k": [whole[:5], b"", whole[5:70_000], whole[70_000:]]}) == [True]
    one, first, last = np.zeros_like(whole), np.zeros(99_999, np.uint8), bytearray(1)
    raw = (last_address := np.frombuffer(last, np.uint8).ctypes.data, (1,), None, 1, "cpu")
    assert last_address and objs.get([("k", one), ("k", (first, raw))]) == [True, True]
    assert np.array_equal(one, whole) and np.array_equal(first, whole[:-1]) and last[0] == whole[-1]
    assert objs.get({"k": [first, bytearray(2)]}) == [False], "one byte too many"


def test_what_is_stored_can_be_counted_listed_pinned_and_cleared(objs: forebay.ObjectStore) -> None:
    keys = [f"page {n}" for n in range(20)]
    objs.put({key: b"x" * (n + 1) for n, key in enumerate(keys)})
    assert objs.count_prefix(keys) == 20 and objs.count_prefix([*keys[:7], "none", *keys[7:]]) == 7
    assert objs.count_prefix([]) == objs.count_prefix(["", "page 0"]) == 0
    assert objs.pin(["page 0", "none"], 60) == [True, False]
    objs.unpin(["page 0", "none"])
    first = objs.list("page", limit=15)
    rest = objs.list("page", after=first[-1][0])
    assert (len(first), len(rest)) == (15, 5) and objs.list("other") == []
    assert dict(first + rest) == {key.encode(): n + 1 for n, key in enumerate(keys)}
    assert objs.drain_evicted() == [] and objs.evicted_missed == 0
    assert objs.gone([forebay.object_digest(key) for key in ("page 0", "none")]) == [False, True]
    with pytest.raises(forebay.InvalidInput, match="32"):
        objs.gone([b"short"])
    assert len({forebay.object_digest(key) for key in keys}) == 20 and len(forebay.object_digest("k")) == 32
    objs.register_memory(bytearray(8192))
    objs.clear()
    assert objs.count_prefix(keys) == 0 and objs.list() == [] and objs.get({"page 0": bytearray(1)}) == [False]
    assert objs.put({"page 0": b"new"}) == [True] and objs.list() == [(b"page 0", 3)]


def test_a_buffer_of_another_length_is_not_written(objs: forebay.ObjectStore) -> None:
    assert objs.put({"k": b"value"}) == [True]
    for length in (4, 6):
        buffer = bytearray(b"." * length)
        assert objs.get({"k": buffer}) == [False] and buffer == b"." * length
    buffer = bytearray(5)
    assert objs.get({"k": buffer}) == [True] and buffer == b"value"


def test_a_key_may_come_twice_in_a_list_of_pairs(objs: forebay.ObjectStore) -> None:
    assert objs.put([("k", b"first"), ("k", b"other")]) == [True, True]
    one, two = bytearray(5), bytearray(5)
    assert objs.get([("k", one), ("k", two)]) == [True, True]
    assert one == two == b"first"
    for wrong in ([("k",)], ["k"], 5):
        with pytest.raises((TypeError, ValueError)):
            objs.get(wrong)  # type: ignore[arg-type]


def test_more_keys_than_the_queue_has_room_for_are_asked_for_in_parts(objs: forebay.ObjectStore) -> None:
    names = [str(n) for n in range(70_000)]
    assert objs.put({"0": b"first", "69999": b"last"}) == [True, True]
    there = objs.exists(names)
    assert len(there) == len(names) and [n for n, is_there in enumerate(there) if is_there] == [0, 69_999]
    assert objs.delete(names) == there and objs.exists(["0", "69999"]) == [False, False]


def test_lmcaches_connector_does_not_raise_what_closing_says(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.lmcache.native import Connector

    class Fails:
        def close(self) -> None:
            raise forebay.TimedOut("it hangs")

    connector = Connector(cache_dir=str(cache), capacity="256MiB")
    store = connector._store
    monkeypatch.setattr(connector, "_store", Fails())
    connector.close()
    store.close()
    assert "it hangs" in caplog.text


def test_they_survive_a_restart_and_namespaces_are_apart(cache: Path) -> None:
    with forebay.ObjectStore(config(cache), namespace="one") as store:
        store.put({"k": b"v"})
    with forebay.ObjectStore(config(cache), namespace="one") as store:
        assert store.exists(["k"]) == [True]
    with forebay.ObjectStore(config(cache), namespace="two") as store:
        assert store.exists(["k"]) == [False]
