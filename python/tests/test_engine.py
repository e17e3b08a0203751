"""Engine, loads and stores: prefixes, masks, cancelling, time-outs, damage, asyncio, threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import threading
import types
import weakref
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BLOCK, BLOCKS, CHUNK, DIM, HEADS, LAYERS, config, geometry, slots

import forebay
from forebay import _aio

SHAPE = (2, BLOCKS, BLOCK, HEADS, DIM)


def kv(fill: float | None = None) -> list[Any]:
    if fill is None:
        rng = np.random.default_rng(7)
        return [rng.random(SHAPE, dtype=np.float32) for _ in range(LAYERS)]
    return [np.full(SHAPE, fill, np.float32) for _ in range(LAYERS)]


def flat(layer: Any) -> Any:
    return layer.reshape(2, BLOCKS * BLOCK, HEADS, DIM)


def test_a_load_is_iterated_layer_by_layer(eng: forebay.Engine) -> None:
    tokens = list(range(64))
    eng.store(tokens, kv(), slots(64)).wait()
    target = kv(0)
    load = eng.load(tokens, target, slots(64))
    seen = []
    for ready in load:
        at = slots(64)
        assert np.array_equal(flat(target[ready.layer])[:, at], flat(kv()[ready.layer])[:, at])
        seen.append((ready.layer, ready.tokens))
    assert seen == [(0, 64), (1, 64), (2, 64)]
    assert list(load) == [] and load.done and load.wait().tokens == 64


def test_the_common_prefix_is_found_and_a_partial_chunk_too(cache: Path) -> None:
    with forebay.Engine(config(cache, save_unfull_chunk=True), geometry()) as eng:
        tokens = list(range(50))
        assert eng.store(tokens, kv(), slots(50), generated=7, wait_for_staging=True).wait().stored == 2
        assert eng.lookup(tokens) == 50
        assert eng.lookup([*range(40), 7]) == CHUNK
        assert eng.lookup([9, *tokens]) == 0
        target = kv(0)
        assert eng.load(tokens, target, slots(50)).wait().tokens == 50
        assert np.array_equal(flat(target[2])[:, slots(50)], flat(kv()[2])[:, slots(50)])


def test_extra_keys_separate_prompts(eng: forebay.Engine) -> None:
    tokens = list(range(32))
    lora = {"name": "a", "path": "/a", "digest": "1"}
    extras: list[Any] = [None, "salt", {"lora": lora}, {"multimodal": [(b"image", 3, 4)]}]
    for extra in extras:
        assert eng.lookup(tokens, extra) == 0
        assert eng.store(tokens, kv(), slots(32), extra).wait().stored == 1
        assert eng.lookup(tokens, extra) == 32
    assert eng.lookup(tokens, {"cache_salt": "salt"}) == 32
    with pytest.raises(forebay.InvalidInput, match="use cache_salt, lora, multimodal"):
        eng.lookup(tokens, {"salt": "x"})


def test_masked_tokens_are_not_written(eng: forebay.Engine) -> None:
    tokens = list(range(64))
    eng.store(tokens, kv(), slots(64)).wait()
    target = kv(-1)
    mask = np.array([t >= 40 for t in range(64)])
    assert eng.load(tokens, target, slots(64), mask=mask).wait().tokens == 64
    for layer in target:
        assert (flat(layer)[:, slots(64)[:40]] == -1).all()
    assert np.array_equal(flat(target[0])[:, slots(64)[40:]], flat(kv()[0])[:, slots(64)[40:]])
    with pytest.raises(forebay.InvalidInput, match="a mask of 3 tokens"):
        eng.load(tokens, target, slots(64), mask=[True] * 3)


@pytest.mark.parametrize("kind", ["list", "array", "int32", "int64", "uint32", "prompt", "strided"])
def test_tokens_and_slots_come_as_lists_or_buffers(eng: forebay.Engine, kind: str) -> None:
    numbers = list(range(32))
    tokens: Any = {
        "list": numbers,
        "array": array("i", numbers),
        "prompt": eng.prompt(numbers),
        "strided": np.repeat(np.array(numbers), 2)[::2],
    }.get(kind)
    if tokens is None:
        tokens = np.array(numbers, dtype=kind)
    mapping: Any = np.array(slots(32), dtype="int64" if kind != "int32" else "int32")
    eng.store(tokens, kv(), mapping).wait()
    assert eng.lookup(numbers) == eng.lookup(tokens) == 32


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], np.zeros(3, np.float32), np.zeros((2, 2), np.int64), b"abc"])
def test_what_is_no_token_list_is_refused(eng: forebay.Engine, tokens: Any) -> None:
    with pytest.raises(forebay.InvalidInput):
        eng.lookup(tokens)


def test_a_store_by_layers(eng: forebay.Engine) -> None:
    tokens, source = list(range(32)), kv()
    paged = eng.paged_kv(source)
    store = eng.store(tokens, paged, slots(32), by_layer=True)
    with pytest.raises(forebay.TimedOut):
        store.wait(timeout_ms=1)
    for layer in range(LAYERS):
        store.layer(layer)
        store.wait_gathered(layer)
        source[layer].fill(0)
    assert store.wait().stored == 1
    target = kv(0)
    eng.load(tokens, target, slots(32)).wait()
    assert np.array_equal(flat(target[1])[:, slots(32)], flat(kv()[1])[:, slots(32)])
    assert eng.store(tokens, paged, slots(32)).wait().already_there == 1


class Large:
    """A prompt whose KV (48 MiB) takes many turns of a small staging area, so that a load of it can be met under way."""

    tokens = list(range(2048))
    slots = np.arange(2048)
    shape = (2, 32, 64, 8, 128)

    def __init__(self, cache: Path) -> None:
        self.eng = forebay.Engine(config(cache), geometry(kv_heads=8, head_size=128))
        source = [np.full(self.shape, i + 1, np.float32) for i in range(LAYERS)]
        assert self.eng.store(self.tokens, source, self.slots, wait_for_staging=True).wait().stored == 2048 // CHUNK
        self.target = [np.zeros(self.shape, np.float32) for _ in range(LAYERS)]
        self.paged = self.eng.paged_kv(self.target)

    def load(self, **more: Any) -> forebay.Load:
        return self.eng.load(self.tokens, self.paged, self.slots, **more)


def test_a_cancelled_load_ends_and_never_writes_again(cache: Path) -> None:
    large = Large(cache)
    with large.eng:
        for _ in range(20):
            load = large.load()
            load.cancel()
            result = load.wait()
            for layer in large.target:
                layer.fill(-1)
            if result.cancelled:
                break
        assert result.cancelled and result.tokens < 2048 and result.misses["cancelled"] >= 1, result
        assert len(result.failed_blocks) >= 1
        assert len(list(load)) in (0, LAYERS)
        # Every read that was under way has come back when the engine is closed.
    for layer in large.target:
        assert (layer == -1).all(), "the memory is the caller's again"


def test_a_load_past_its_time_is_a_miss(cache: Path) -> None:
    large = Large(cache)
    with large.eng:
        result = large.load(timeout_ms=0).wait(timeout_ms=60_000)
        assert result.tokens < 2048 and result.misses["timed_out"] >= 1, result
        assert not result.cancelled
        assert large.load().wait().tokens == 2048, "and the next one comes"
    assert (large.target[2] == 3).all()


def test_a_damaged_file_is_a_miss_with_its_blocks(cache: Path) -> None:
    tokens = list(range(64))
    with forebay.Engine(config(cache), geometry()) as eng:
        eng.store(tokens, kv(), slots(64), wait_for_staging=True).wait()
    for data in cache.rglob("data.kv"):
        with data.open("r+b") as file:
            bytes_ = bytearray(file.read())
            pattern = kv()[1].reshape(2, BLOCKS * BLOCK, HEADS * DIM)[0, slots(64)[0]].tobytes()
            at = bytes_.find(pattern)
            assert at > 0
            file.seek(at)
            file.write(bytes([bytes_[at] ^ 1]))
    with forebay.Engine(config(cache), geometry()) as eng:
        result = eng.load(tokens, kv(0), slots(64)).wait()
        assert result.tokens == 0 and result.misses == {"corrupt": 1, "prefix": 1}
        assert result.failed_blocks == sorted({s // BLOCK for s in slots(64)})
        assert eng.lookup(tokens) == 0, "it is not served again"


def test_a_restart_keeps_the_cache(cache: Path) -> None:
    tokens = list(range(64))
    with forebay.Engine(config(cache), geometry()) as eng:
        eng.store(tokens, kv(), slots(64), wait_for_staging=True).wait()
        eng.flush()
    with forebay.Engine(config(cache), geometry()) as eng:
        assert eng.lookup(tokens) == 64
        assert eng.remove(tokens) == 2 and eng.lookup(tokens) == 0
    with forebay.Engine(config(cache), geometry(fingerprint="other")) as eng:
        assert eng.lookup(tokens) == 0, "another fingerprint, another namespace"


def test_asyncio_gets_layers_results_and_stores(eng: forebay.Engine) -> None:
    tokens = list(range(64))

    async def serve(n: int) -> list[int]:
        mine = [n, *tokens[1:]]
        assert (await eng.store(mine, kv(), slots(64))).stored == 2
        load = eng.load(mine, kv(0), slots(64))
        layers = [ready.layer async for ready in load]
        assert (await load).tokens == 64
        return layers

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(serve(n) for n in range(8)))

    assert asyncio.run(all_of_them()) == [list(range(LAYERS))] * 8


def test_two_tasks_await_the_same_store(eng: forebay.Engine) -> None:
    async def both() -> list[int]:
        store = eng.store(list(range(32)), kv(), slots(32), by_layer=True)

        async def one() -> int:
            return (await store).stored

        tasks = [asyncio.create_task(one()) for _ in range(2)]
        await asyncio.sleep(0.05)
        store.all_layers()
        return await asyncio.wait_for(asyncio.gather(*tasks), 60)

    assert asyncio.run(both()) == [1, 1]


def test_a_task_is_woken_though_another_has_asked_after_the_end(eng: forebay.Engine) -> None:
    async def both() -> list[int]:
        store = eng.store(list(range(32)), kv(), slots(32), by_layer=True)

        async def one() -> int:
            return (await store).stored

        first = asyncio.create_task(one())
        await asyncio.sleep(0.05)
        store.all_layers()
        store.wait()  # The loop does not run meanwhile.
        second = await one()
        return [await asyncio.wait_for(first, 60), second]

    assert asyncio.run(both()) == [1, 1]


def test_a_load_whose_await_was_cancelled_ends_when_it_is_dropped(cache: Path) -> None:
    large = Large(cache)

    async def give_up() -> None:
        load = large.load()
        before = sys.getrefcount(load)
        waiting = asyncio.ensure_future(load)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        del waiting
        gc.collect()
        assert sys.getrefcount(load) == before, "nothing else keeps it"
        del load
        for layer in large.target:
            layer.fill(-1)

    with large.eng:
        asyncio.run(give_up())
    for layer in large.target:
        assert (layer == -1).all(), "the memory is the caller's again"


def test_one_task_awaits_the_layers_and_another_the_result(cache: Path) -> None:
    large = Large(cache)

    async def both() -> list[Any]:
        load = large.load(by_layer=True)

        async def result() -> int:
            return (await load).tokens

        async def layers() -> list[int]:
            return [ready.layer async for ready in load]

        return await asyncio.wait_for(asyncio.gather(result(), layers()), 60)

    with large.eng:
        assert asyncio.run(both()) == [2048, list(range(LAYERS))]


class OnAccelerator:
    """A load of one layer whose copies end when `landed` is set, as the event loop sees it."""

    def __init__(self) -> None:
        self.landed, self.given = threading.Event(), 0

    def _poll(self) -> tuple[bool, Any, Any]:
        if self.given:
            return True, None, None
        self.given = 1
        return False, types.SimpleNamespace(layer=0), self.landed.wait

    def _give_back(self, layer: int) -> None:
        self.given = layer


def test_a_layer_that_a_cancelled_task_did_not_get_comes_again() -> None:
    load = OnAccelerator()

    async def twice() -> list[int]:
        waiting = asyncio.ensure_future(anext(_aio.layers(load)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        load.landed.set()
        return [ready.layer async for ready in _aio.layers(load)]  # type: ignore[arg-type]

    assert asyncio.run(twice()) == [0]


def test_no_wait_holds_the_gil(eng: forebay.Engine) -> None:
    store = eng.store(list(range(32)), kv(), slots(32), by_layer=True)
    waiting = threading.Thread(target=store.wait)
    waiting.start()
    assert waiting.is_alive(), "it waits for layers, and this thread runs"
    store.all_layers()
    waiting.join(30)
    assert not waiting.is_alive()


def test_memory_lives_as_long_as_it_is_used_and_no_longer(eng: forebay.Engine) -> None:
    class Tensor:
        """Has a tensor's methods, and no buffer protocol."""

        def __init__(self, of: Any) -> None:
            self.of, self.shape, self.device, self.dtype = of, of.shape, "cpu", "torch.float32"

        def data_ptr(self) -> int:
            return int(self.of.ctypes.data)

        def element_size(self) -> int:
            return int(self.of.itemsize)

        def stride(self) -> tuple[int, ...]:
            return tuple(s // self.of.itemsize for s in self.of.strides)

    for n in range(20):
        tensors, gone = [Tensor(layer) for layer in kv()], [threading.Event() for _ in range(LAYERS)]
        refs = [weakref.ref(t, lambda _, event=event: event.set()) for t, event in zip(tensors, gone, strict=True)]
        paged = eng.paged_kv(tensors)
        del tensors
        gc.collect()
        assert all(ref() is not None for ref in refs)
        assert eng.store([n] * 32, paged, slots(32)).wait().stored == 1
        del paged
        gc.collect()
        # A thread of the engine may be the last to drop them. No call follows.
        assert all(event.wait(30) for event in gone)


def test_raw_descriptions_and_dlpack(eng: forebay.Engine) -> None:
    source = kv()
    raw = [(layer.ctypes.data, layer.shape, None, layer.itemsize, "cpu") for layer in source]
    assert eng.store(list(range(32)), raw, slots(32)).wait().stored == 1

    class Packed:
        def __init__(self, of: Any) -> None:
            self.__dlpack__, self.__dlpack_device__ = of.__dlpack__, of.__dlpack_device__

    target = kv(0)
    before = sys.getrefcount(target[0])
    paged = eng.paged_kv([Packed(layer) for layer in target])
    assert eng.load(list(range(32)), paged, slots(32)).wait().tokens == 32
    assert np.array_equal(flat(target[0])[:, slots(32)], flat(source[0])[:, slots(32)])
    assert sys.getrefcount(target[0]) > before
    with pytest.raises(forebay.InvalidInput, match="not \\(address, shape"):
        eng.paged_kv([(1, 2, 3, "x", 5)] * LAYERS)


def test_figures_and_logs(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    from forebay import _logging

    caplog.set_level(logging.WARNING, logger="forebay")
    with forebay.Engine(config(cache, enable_rdma=True), geometry()) as eng:
        eng.store(list(range(64)), kv(), slots(64), wait_for_staging=True).wait()
        eng.lookup(list(range(64)))
        stats = eng.stats()
        assert (stats["stored_chunks"], stats["matched_tokens"], stats["up"]) == (2, 64, True)
        assert "forebay_stored_chunks_total 2" in eng.metrics()
    _logging.flush()
    assert any("enable_rdma" in r.message and r.name.startswith("forebay") for r in caplog.records), caplog.records


def test_a_handler_that_raises_costs_its_own_line(
    cache: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    from forebay import _logging

    class Raising(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            self.handle = lambda record: True  # type: ignore[method-assign]
            raise RuntimeError("a handler that fails once")

    caplog.set_level(logging.WARNING, logger="forebay")
    raising = Raising()
    logging.getLogger("forebay").addHandler(raising)
    try:
        for _ in range(2):
            with forebay.Engine(config(cache, enable_rdma=True), geometry()):
                pass
        _logging.flush()
    finally:
        logging.getLogger("forebay").removeHandler(raising)
    assert "a handler that fails once" in capsys.readouterr().err
    assert any("enable_rdma" in r.message for r in caplog.records), caplog.records


def test_a_prefetch_brings_chunks_into_memory(cache: Path, eng: forebay.Engine) -> None:
    tokens = list(range(64))
    eng.store(tokens, kv(), slots(64)).wait()
    assert eng.prefetch(tokens).wait() == {"found": 0, "in_memory": 0, "read": 0, "failed": 0, "no_room": 0, "cancelled": False, "off": True}
    with forebay.Engine(config(cache, local_cpu=True, max_local_cpu_size="1MiB"), geometry()) as reader:
        ahead = reader.prefetch(tokens, start=CHUNK)
        found = ahead.wait(timeout_ms=60_000)
        assert (found["found"], found["read"], found["off"]) == (1, 1, False)
        assert ahead.done and ahead.counts == found
        assert reader.prefetch(tokens, stop=CHUNK).wait(60_000)["read"] == 1
        target = kv(0)
        assert reader.load(tokens, target, slots(64)).wait().tokens == 64
        assert np.array_equal(flat(target[2])[:, slots(64)], flat(kv()[2])[:, slots(64)])
        assert reader.stats()["read_bytes"] == 0 and reader.stats()["memory"]["hits"] == 2
        assert reader.stats()["prefetch"]["used"] == 2
        ahead.cancel()
        assert reader.stats()["prefetch"]["held_bytes"] == 0
