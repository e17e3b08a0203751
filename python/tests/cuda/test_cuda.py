"""KV in a GPU's memory through the Python package: tensors, raw pointers, streams. Runs on a GPU, else on the stand-in (test.sh)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conftest import BLOCK, BLOCKS, CHUNK, DIM, HEADS, LAYERS, config, geometry, open_segment, slots  # noqa: E402
from driver import Gpu, Tensor  # noqa: E402

import forebay  # noqa: E402

SHAPE = (2, BLOCKS, BLOCK, HEADS, DIM)
TOKENS = list(range(64))


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def cuda_eng(cache: Path, gpu: Gpu) -> Any:
    with forebay.Engine(config(cache), geometry(), device=gpu.name) as engine:
        assert engine.is_up, engine.why_disabled
        open_segment(engine, [gpu.tensor(np.zeros(SHAPE, np.float32)) for _ in range(LAYERS)])
        yield engine


def values() -> list[Any]:
    rng = np.random.default_rng(11)
    return [rng.random(SHAPE, dtype=np.float32) for _ in range(LAYERS)]


def at(layer: Any, n: int = 64) -> Any:
    """The loaded slots of a layer."""
    return layer.reshape(2, BLOCKS * BLOCK, HEADS, DIM)[:, slots(n)]


def test_tensors_come_back_byte_for_byte_on_their_streams(cuda_eng: forebay.Engine, gpu: Gpu) -> None:
    source, stream = [gpu.tensor(np.zeros(SHAPE, np.float32)) for _ in range(LAYERS)], gpu.stream()
    wanted = values()
    for tensor, value in zip(source, wanted, strict=True):
        tensor.write_on(stream, value)
    # Not synchronised: the store must come after the stream's work so far.
    store = cuda_eng.store(TOKENS, source, slots(64), stream=stream)
    assert store.wait().stored == 64 // CHUNK
    assert cuda_eng.lookup(TOKENS) == 64
    target, back = [gpu.tensor(np.full(SHAPE, -1, np.float32)) for _ in range(LAYERS)], gpu.stream()
    load = cuda_eng.load(TOKENS, target, slots(64), stream=back)
    seen = []
    for ready in load:
        # The iteration has made `back` wait for the layer: a copy on it sees the KV.
        copy = target[ready.layer].read_on(back)
        back.synchronize()
        assert np.array_equal(at(copy), at(wanted[ready.layer]))
        seen.append(ready.layer)
    result = load.wait()
    assert seen == list(range(LAYERS)) and result.tokens == 64 and not result.failed_blocks
    untouched = sorted(set(range(BLOCKS * BLOCK)) - set(slots(64)))
    for tensor in target:
        assert (tensor.read().reshape(2, -1, HEADS, DIM)[:, untouched] == -1).all(), "only mapped slots are written"


@pytest.mark.parametrize("with_stream", [True, False])
def test_layers_come_in_an_event_loop(cuda_eng: forebay.Engine, gpu: Gpu, with_stream: bool) -> None:
    wanted, stream = values(), gpu.stream()
    cuda_eng.store(TOKENS, [gpu.tensor(v) for v in wanted], slots(64)).wait()
    target = [gpu.tensor(np.full(SHAPE, -1, np.float32)) for _ in range(LAYERS)]

    async def layers() -> list[int]:
        load, seen = cuda_eng.load(TOKENS, target, slots(64), stream=stream if with_stream else None), []
        async for ready in load:
            copy = target[ready.layer].read_on(stream)
            stream.synchronize()
            assert np.array_equal(at(copy), at(wanted[ready.layer]))
            seen.append(ready.layer)
        assert (await load).tokens == 64
        return seen

    assert asyncio.run(layers()) == list(range(LAYERS))


def test_raw_pointers_and_raw_streams_work_as_tensors_do(cuda_eng: forebay.Engine, gpu: Gpu) -> None:
    source, stream = [gpu.tensor(v) for v in values()], gpu.stream()

    def raw(tensor: Tensor) -> tuple[int, tuple[int, ...], None, int, str]:
        return tensor.data_ptr(), tensor.shape, None, tensor.element_size(), gpu.name

    cuda_eng.store(TOKENS, [raw(t) for t in source], slots(64), stream=stream.cuda_stream).wait()
    target = [gpu.tensor(np.zeros(SHAPE, np.float32)) for _ in range(LAYERS)]
    assert cuda_eng.load(TOKENS, [raw(t) for t in target], slots(64), stream=stream.cuda_stream).wait().tokens == 64
    for tensor, wanted in zip(target, values(), strict=True):
        assert np.array_equal(at(tensor.read()), at(wanted))


def test_what_the_gpu_stored_the_host_loads_and_back(cache: Path, gpu: Gpu) -> None:
    with forebay.Engine(config(cache), geometry(), device=np.int64(0)) as engine:
        engine.store(TOKENS, [gpu.tensor(v) for v in values()], slots(64), wait_for_staging=True).wait()
        engine.flush()
    host = [np.zeros(SHAPE, np.float32) for _ in range(LAYERS)]
    with forebay.Engine(config(cache), geometry(), device="cpu") as engine:
        assert engine.load(TOKENS, host, slots(64)).wait().tokens == 64
        other = [t + 1000 for t in TOKENS]
        engine.store(other, values(), slots(64), wait_for_staging=True).wait()
        engine.flush()
    assert all(np.array_equal(at(h), at(v)) for h, v in zip(host, values(), strict=True))
    target = [gpu.tensor(np.zeros(SHAPE, np.float32)) for _ in range(LAYERS)]
    with forebay.Engine(config(cache), geometry(), device=gpu.name) as engine:
        assert engine.load(other, target, slots(64)).wait().tokens == 64
    assert all(np.array_equal(at(t.read()), at(v)) for t, v in zip(target, values(), strict=True))


def test_a_damaged_file_is_a_miss_on_a_gpu_too(cache: Path, gpu: Gpu) -> None:
    with forebay.Engine(config(cache), geometry(), device=gpu.name) as engine:
        engine.store(TOKENS, [gpu.tensor(v) for v in values()], slots(64), wait_for_staging=True).wait()
        engine.flush()
    pattern = values()[1].reshape(2, BLOCKS * BLOCK, HEADS * DIM)[0, slots(64)[CHUNK]].tobytes()
    (data,) = [f for f in cache.rglob("data.kv") if pattern in f.read_bytes()]
    with data.open("r+b") as file:
        where = data.read_bytes().find(pattern)
        file.seek(where)
        file.write(bytes([pattern[0] ^ 1]))
    target = [gpu.tensor(np.zeros(SHAPE, np.float32)) for _ in range(LAYERS)]
    with forebay.Engine(config(cache), geometry(), device=gpu.name) as engine:
        result = engine.load(TOKENS, target, slots(64)).wait()
        assert result.tokens == CHUNK and result.misses == {"corrupt": 1}
        assert result.failed_blocks == sorted({s // BLOCK for s in slots(64)[CHUNK:]})
        assert engine.lookup(TOKENS) == CHUNK


def test_host_tensors_are_refused_by_an_engine_on_a_gpu(cuda_eng: forebay.Engine) -> None:
    with pytest.raises(forebay.InvalidInput, match="cuda:0|cpu|device|host"):
        cuda_eng.store(TOKENS, values(), slots(64))


def test_torch_tensors_on_a_gpu(cuda_eng: forebay.Engine) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here: the stand-in has no CUDA runtime")
    source = [torch.from_numpy(v).cuda() for v in values()]
    stream = torch.cuda.Stream()
    assert cuda_eng.store(TOKENS, source, slots(64), stream=torch.cuda.current_stream()).wait().stored == 2
    target = [torch.zeros_like(t) for t in source]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        load = cuda_eng.load(TOKENS, target, slots(64), stream=stream)
        for ready in load:
            copy = target[ready.layer].clone()
            assert np.array_equal(at(copy.cpu().numpy()), at(values()[ready.layer]))
    assert load.wait().tokens == 64
