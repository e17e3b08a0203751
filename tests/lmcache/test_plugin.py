"""What only the door `plugin` has: locks, notices of what has gone, LMCache's memory, listings, tags."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forebay
import lmcache
import pytest
import torch
from conftest import spec
from driving import NO_LAYOUT, PATIENCE_S, adapter, bits, found, key, load, memory, same, store, wait
from forebay.lmcache import plugin
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import EvictionAction, EvictionDestination, L1MemoryDesc, L2AdapterListener
from lmcache.v1.distributed.storage_controllers.eviction_controller import L2EvictionController
from lmcache.v1.memory_management import GDSMemoryObject, MemoryFormat, MemoryObjMetadata, TensorMemoryObj

pytestmark = pytest.mark.ci
MIB = 1 << 20


class Heard(L2AdapterListener):
    """What LMCache's listeners are told."""

    def __init__(self) -> None:
        self.stored: dict[ObjectKey, int] = {}
        self.accessed: list[ObjectKey] = []
        self.gone: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.stored |= dict(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.gone += keys


def until(holds: Any) -> None:
    """Waits for what another thread tells."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def lookup(over: Any, numbers: list[int]) -> list[bool]:
    """Looks up and locks."""
    task = over.submit_lookup_and_lock_task([key(number) for number in numbers], {0: NO_LAYOUT})
    return bits(wait(over.get_lookup_and_lock_event_fd(), lambda: over.query_lookup_and_lock_result(task)), len(numbers))


def fill(over: Any, first: int, count: int) -> None:
    for start in range(first, first + count, 8):
        store(over, {number: memory(4 * MIB, number) for number in range(start, start + 8)})


def test_what_a_lookup_has_locked_survives_until_it_is_unlocked(cache: Path) -> None:
    locked = [0, 1, 2]
    with adapter(spec(cache, capacity="256MiB")) as over:
        fill(over, 0, 32)
        assert lookup(over, [*locked, 999]) == [True, True, True, False]
        fill(over, 100, 160)
        assert not any(found(over, list(range(16, 32))))
        targets = {number: memory(4 * MIB, None) for number in locked}
        assert load(over, targets) == [True] * 3
        assert all(same(targets[number], memory(4 * MIB, number)) for number in locked)
        over.submit_unlock([key(number) for number in locked])
        fill(over, 300, 160)
        assert found(over, locked) == [False] * 3


class NoPins:
    """A store that may lease nothing, as on a read-only mount or beyond `lease_share`."""

    def __init__(self, store: forebay.ObjectStore) -> None:
        self._real = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def pin(self, keys: list[str], ttl_s: float) -> list[bool]:
        return [False for _ in keys]


def test_what_cannot_be_locked_is_found_all_the_same(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with adapter(spec(cache)) as over:
        assert store(over, {1: memory(5000, 1)})
        monkeypatch.setattr(over, "_store", NoPins(over._store))
        assert lookup(over, [1, 2]) == [True, False]
        targets = {1: memory(5000, None)}
        assert load(over, targets) == [True] and same(targets[1], memory(5000, 1))
        over.submit_unlock([key(1)])


def test_a_value_of_another_length_makes_room_for_the_right_one(cache: Path) -> None:
    with adapter(spec(cache)) as over:
        assert store(over, {1: memory(5000, 1)})
        assert load(over, {1: memory(4000, None)}) == [False]
        until(lambda: not any(lookup(over, [1])))
        assert store(over, {1: memory(4000, 2)})
        targets = {1: memory(4000, None)}
        assert load(over, targets) == [True] and same(targets[1], memory(4000, 2))


def test_a_cache_that_cannot_be_closed_stops_no_other_adapter(cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with adapter(spec(cache)) as over:
        real = over._store

        class Fails:
            def close(self) -> None:
                real.close()
                raise forebay.TimedOut("it hangs")

        monkeypatch.setattr(over, "_store", Fails())
    assert "it hangs" in caplog.text


def test_lmcaches_own_settings_are_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "lm://localhost:65432")
    monkeypatch.setenv("LMCACHE_REMOTE_SERDE", "cachegen")
    with adapter(spec(cache)) as over:
        assert store(over, {1: memory(5000, 1)})


def test_values_of_bfloat16_are_coded_and_the_same_and_others_stored_as_they_are(cache: Path) -> None:
    def value(dtype: torch.dtype, fill: float) -> TensorMemoryObj:
        data = (torch.randn(MIB, generator=torch.Generator().manual_seed(7)) * fill).to(dtype)
        shape = MemoryObjMetadata(
            shape=data.shape, dtype=dtype, address=0, phy_size=2 * MIB, fmt=MemoryFormat.BINARY_BUFFER, ref_count=1
        )
        return TensorMemoryObj(raw_data=data.view(torch.uint8), metadata=shape, parent_allocator=None)

    with adapter(spec(cache, codec="exp4")) as over:
        sizes = []
        for number, dtype in ((1, torch.bfloat16), (2, torch.float16)):
            before = over.report_status()["live_bytes"]
            store(over, {number: value(dtype, 1)})
            sizes.append(over.report_status()["live_bytes"] - before)
            target = {number: value(dtype, 0)}
            assert load(over, target) == [True] and same(target[number], value(dtype, 1))
        assert sizes[0] < 0.77 * 2 * MIB < 2 * MIB <= sizes[1], sizes


def test_values_that_are_not_in_host_memory_are_refused_with_what_to_do(cache: Path) -> None:
    value = memory(5000, 1)
    in_gds = GDSMemoryObject(value.metadata)
    with adapter(spec(cache)) as over:
        for submit in (over.submit_store_task, over.submit_load_task):
            with pytest.raises(forebay.Unsupported, match="start LMCache without --gds-l1-path"):
                submit([key(1)], [in_gds])
        assert store(over, {1: value}) and found(over, [1]) == [True]


def test_a_listing_of_a_cache_that_is_not_open_is_unavailable(cache: Path) -> None:
    (cache / "file").touch()
    with adapter(spec(cache / "file" / "x")) as over:
        assert not over.report_status()["is_healthy"]
        with pytest.raises(NotImplementedError, match="cannot list"):
            over.list_l2_keys()


def test_lmcache_hears_what_is_stored_read_evicted_and_deleted(cache: Path) -> None:
    heard = Heard()
    with adapter(spec(cache, capacity="256MiB")) as over:
        over.register_listener(heard)
        fill(over, 0, 8)
        assert heard.stored == {key(number): 4 * MIB for number in range(8)}
        assert over.get_usage().total_bytes_used == 32 * MIB and not over.supports_global_eviction
        # What is there already is not counted twice.
        fill(over, 0, 8)
        assert over.get_usage().total_bytes_used == 32 * MIB
        assert load(over, {1: memory(4 * MIB, None), 999: memory(4 * MIB, None)}) == [True, False]
        assert heard.accessed == [key(1)]
        over.delete([key(1), key(999)])
        assert heard.gone == [key(1)]
        fill(over, 100, 240)
        until(lambda: over.get_usage().total_bytes_used <= 256 * MIB)
        # What LMCache was told is what is so.
        until(lambda: found(over, [int.from_bytes(one.chunk_hash, "big") for one in heard.gone]) == [False] * len(heard.gone))
        assert {key(number) for number in range(2, 8)} <= set(heard.gone)


def test_what_another_server_has_deleted_is_told_when_it_is_missed(cache: Path) -> None:
    heard = Heard()
    with adapter(spec(cache)) as one, adapter(spec(cache)) as other:
        one.register_listener(heard)
        store(one, {1: memory(5000, 1)})
        other.delete([key(1)])
        assert load(one, {1: memory(5000, None)}) == [False]
        until(lambda: heard.gone == [key(1)])
        assert one.get_usage().total_bytes_used == 0


def test_what_another_server_has_deleted_is_told_though_no_load_asks_for_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "LOOK_S", 0)
    heard = Heard()
    with adapter(spec(cache)) as one, adapter(spec(cache)) as other:
        one.register_listener(heard)
        store(one, {1: memory(5000, 1), 2: memory(5000, 2)})
        other.delete([key(1)])
        assert found(one, [1, 2]) == [False, True], "so that LMCache does not load it"
        until(lambda: heard.gone == [key(1)])
        assert one.get_usage().total_bytes_used == 5000


def test_a_value_that_another_server_stored_first_is_told_gone_too(cache: Path) -> None:
    heard = Heard()
    with adapter(spec(cache)) as one, adapter(spec(cache)) as other:
        one.register_listener(heard)
        store(other, {1: memory(5000, 1)})
        store(one, {1: memory(5000, 1)})
        assert heard.stored == {key(1): 0}
        one.delete([key(1)])
        assert heard.gone == [key(1)] and one.get_usage().total_bytes_used == 0


def test_batches_that_fail_for_one_reason_do_not_fill_the_log(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with adapter(spec(cache)) as over:
        for number, (kind, cause) in enumerate([("put", "no_space"), ("put", "no_space"), ("get", "io_error"), ("put", "io_error")]):
            over._tasks[-1 - number] = [(key(1), plugin.name(key(1))), (key(2), plugin.name(key(2)))]
            over._take(forebay.Completion(-1 - number, kind, [True, False], [1, 0], [None, cause], "it failed"))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING" and "it failed" in record.getMessage()] == [
        "a store of 2 keys: it failed",
        "a load of 2 keys: it failed",
        "a store of 2 keys: it failed",
    ]


def test_a_deletion_that_fails_is_told_and_ends_no_thread_of_lmcaches(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with adapter(spec(cache)) as over:
        store(over, {1: memory(5000, 1)})
        over.delete([key(1), key(999)])
        assert "could not be deleted" not in caplog.text
    # The thread that enforces quotas calls this, and catches nothing.
    action: Any = EvictionAction(keys=[key(1)], destination=EvictionDestination.DISCARD)
    evicting: Any = SimpleNamespace()
    L2EvictionController._execute_eviction_action(evicting, over, action)
    assert "1 of 1 keys could not be deleted" in caplog.text


def test_what_another_server_has_deleted_is_told_when_it_is_to_be_deleted_too(cache: Path) -> None:
    heard = Heard()
    with adapter(spec(cache)) as one, adapter(spec(cache)) as other:
        one.register_listener(heard)
        store(one, {1: memory(5000, 1), 2: memory(5000, 2)})
        other.delete([key(1)])
        one.delete([key(1), key(999)])
        assert heard.gone == [key(1)] and one.get_usage().total_bytes_used == 5000


def test_a_value_that_another_server_has_deleted_and_that_is_stored_again_is_counted_once(cache: Path) -> None:
    heard = Heard()
    with adapter(spec(cache)) as one, adapter(spec(cache)) as other:
        one.register_listener(heard)
        for _ in range(3):
            store(one, {1: memory(5000, 1)})
            assert one.get_usage().total_bytes_used == 5000
            other.delete([key(1)])
        assert heard.gone == [key(1)] * 2


@pytest.mark.parametrize("registers", [False, True])
def test_values_go_into_and_out_of_lmcaches_memory_which_the_kernel_has_only_where_it_is_registered(cache: Path, registers: bool) -> None:
    length, count = 300 * 1024, 8
    arena = torch.frombuffer(mmap.mmap(-1, 16 * MIB), dtype=torch.uint8)
    described = L1MemoryDesc(ptr=arena.data_ptr(), size=16 * MIB, align_bytes=4096, stable_registration_size=16 * MIB)

    def inside(at: int, fill: int | None) -> TensorMemoryObj:
        data = arena[at * length : (at + 1) * length]
        data.copy_(memory(length, fill).raw_data) if fill is not None else data.zero_()
        metadata = MemoryObjMetadata(
            shape=torch.Size([length]), dtype=torch.uint8, address=at * length, phy_size=length, fmt=MemoryFormat.BINARY_BUFFER, ref_count=1
        )
        return TensorMemoryObj(raw_data=data, metadata=metadata, parent_allocator=None)

    with adapter(spec(cache, **({"register_memory": True} if registers else {})), described) as over:
        assert store(over, {number: inside(number, number) for number in range(count)})
        targets = {number: inside(count + number, None) for number in range(count)}
        assert load(over, targets) == [True] * count
        assert all(same(targets[number], memory(length, number)) for number in range(count))
        # Memory of another owner is served as well.
        elsewhere = memory(length, None)
        assert load(over, {3: elsewhere}) == [True] and same(elsewhere, memory(length, 3))
        assert (over.report_status()["direct_bytes"] > 0) == registers


def test_whether_memory_is_registered_is_true_or_false(cache: Path) -> None:
    with pytest.raises(forebay.ConfigError, match="register_memory"), adapter(spec(cache, register_memory="false")):
        pass


def test_both_doors_have_the_same_bytes_without_a_layout(cache: Path) -> None:
    with adapter(spec(cache)) as one, adapter(spec(cache, "native_plugin")) as other:
        assert store(one, {1: memory(5000, 1)}) and store(other, {2: memory(5000, 2)})
        assert found(one, [1, 2]) == found(other, [1, 2]) == [True, True]


def test_keys_are_listed_in_pages(cache: Path) -> None:
    with adapter(spec(cache)) as over:
        store(over, {number: memory(1000 + number, number) for number in range(25)})
        seen, cursor = {}, None
        while True:
            page = over.list_l2_keys("org/model", 10, cursor)
            assert len(page.entries) <= 10
            seen |= {entry.key.to_object_key(): entry.size_bytes for entry in page.entries}
            if (cursor := page.next_page_token) is None:
                break
        assert seen == {key(number): 1000 + number for number in range(25)}
        assert over.list_l2_keys("org/other").entries == ()


def test_the_server_is_told_what_it_asks_for(cache: Path) -> None:
    with adapter(spec(cache)) as over:
        store(over, {1: memory(1000, 1)})
        over.submit_touch([key(1)])
        status = over.report_status()
        assert status["is_healthy"] and status["put"]["ok"] == 1
        if lmcache.__version__ != "0.5.6":
            tags = over.get_memory_tags()
            assert (tags.segment.value, tags.residency.value) == ("storage", "local")
    over.close()
