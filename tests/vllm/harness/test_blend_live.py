"""A worker's blends when a drive takes its time, when the cache is reset, and at the end; without a model and without a drive."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from forebay._quiet import Quiet
from forebay.vllm import working
from forebay.vllm.blend import blender
from forebay.vllm.blend.blender import Asked, Blender
from forebay.vllm.blend.live import Job, Live
from forebay.vllm.blend.segments import AT_ONCE, Chain, Dimensions, Rows, Segments
from forebay.vllm.blend.worker import runner_of
from forebay.vllm.geometry import Unsupported
from forebay.vllm.meta import StepMetadata

#: A prompt with two segments, and the rest of a job.
ASKED = Asked(list(range(100)), [(10, 40), (50, 90)], "none", [0.0], anchor=list(range(10)))
BLOCK = 16


class Slow(Future):  # type: ignore[type-arg]
    """Nobody may wait for its result."""

    def result(self, timeout: float | None = None) -> Any:
        assert self.done(), "the step waits for a drive"
        return super().result(timeout)


class Drive:
    """Segments whose loads and stores end when the test says so."""

    def __init__(self, stored: bool = True) -> None:
        self.stored, self.under_way = stored, list[Slow]()

    def chains(self, anchor: list[int], segments: list[list[int]]) -> list[Chain]:
        return [Chain(anchor, segment, None) for segment in segments]

    def has(self, _: Chain) -> bool:
        return self.stored

    def begin(self, *_: Any) -> Slow:
        self.under_way.append(Slow())
        return self.under_way[-1]

    store = begin

    def end(self, result: Any) -> None:
        """Ends all that has begun."""
        for one in self.under_way:
            if not one.done():
                one.set_result(result)


class Others:
    """The other tensor-parallel workers, which may not be done yet."""

    def __init__(self) -> None:
        self.rank, self.count, self.done = 0, 2, True

    def all(self, flags: list[bool]) -> list[bool]:
        return [flag and self.done for flag in flags]

    def leave(self, error: Exception) -> None:
        raise error


def live(drive: Drive) -> Any:
    """A worker's blends over this drive; `computed` rows of it are counted."""
    made: Any = object.__new__(Live)
    blender: Any = object.__new__(Blender)
    nested = SimpleNamespace(device=torch.device("cpu"), block=BLOCK, computed=0)

    def steps(rows: list[int], _: Any = None) -> Any:
        yield len(rows)
        nested.computed += len(rows)

    nested.steps, nested.begin, nested.write, nested.copy_to = steps, *(lambda *_: None for _ in range(3))
    runner = SimpleNamespace(vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=64)))

    def opened(self: Any, *_: Any) -> None:
        self._nested, self._connector, self._segments, self.ranks = nested, SimpleNamespace(block_tokens=BLOCK), drive, Others()
        self._of = Dimensions(2, 1, 4, torch.float32)
        self._quiet, self.limit_ms = SimpleNamespace(warn=lambda *_: None), 2000

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Blender, "__init__", opened)
        made.__init__(runner, blender, "query", [1])
    return made


def job(stores: bool = False) -> Job:
    """A blend of the prompt."""
    return Job("a", ASKED, 96, 0, list(range(6)), stores)


def counted(of: Any) -> dict[str, int]:
    return {name.removeprefix("blend_"): count for name, count in of.counts().items()}


def test_no_step_waits_for_the_loads_of_a_blend() -> None:
    drive = Drive()
    blends = live(drive)
    blends.add([job()])
    for _ in range(3):
        blends.advance()
    assert (len(drive.under_way), blends._blender._nested.computed, blends.results(set())) == (2, 0, (set(), set()))
    drive.end(True)
    blends._blender.ranks.done = False
    blends.advance()
    assert blends._blender._nested.computed == 0, "another worker still loads"
    blends._blender.ranks.done = True
    for _ in range(2):
        blends.advance()
    assert blends.results(set()) == ({"a"}, set())
    assert counted(blends) == {"segments_reused": 2, "requests": 1, "tokens_reused": 70}


def test_no_step_waits_for_the_stores_of_a_blend() -> None:
    drive = Drive(stored=False)
    blends = live(drive)
    blends.add([job(stores=True)])
    # Computed, and on its way to the drive; the second is not begun before the first is over.
    for _ in range(3):
        blends.advance()
    assert (len(drive.under_way), blends.results(set())) == (1, (set(), set()))
    drive.end(None)
    for _ in range(3):
        blends.advance()
    assert len(drive.under_way) == 2
    drive.end("a full drive")
    blends.advance()
    assert blends.results(set()) == ({"a"}, {"a"})
    assert counted(blends) == {"segments_stored": 1, "segments_not_stored": 1, "computed_missing": 1}


def test_a_reset_fails_the_blends_under_way_and_all_that_come() -> None:
    drive = Drive(stored=False)
    blends = live(drive)
    blends.add([job(stores=True)])
    for _ in range(3):
        blends.advance()
    half: Any = object.__new__(working.WorkerHalf)
    half._side, half._held, half._blends = None, set(), blends
    half.start_load_kv(StepMetadata(rests=True))
    assert drive.under_way[0].cancelled(), "what has not begun is not stored"
    assert blends.results(set()) == ({"a"}, {"a"})
    half.start_load_kv(StepMetadata(blends=(job(stores=True),), rests=True))
    blends.advance()
    assert (blends.results(set()), len(drive.under_way)) == (({"a"}, {"a"}), 1)
    assert counted(blends) == {"computed_reset": 2}


def test_segments_are_hashed_behind_their_anchor_and_given_up_in_time() -> None:
    calls: list[Any] = []

    class Prompt:
        def __init__(self, tokens: list[int]) -> None:
            self.tokens = tokens
            calls.append(len(tokens))

        def extended(self, more: list[int]) -> str:
            return f"{len(self.tokens)} and {len(more)}"

    def load(prompt: str, *_: Any, **given: Any) -> Any:
        calls.append((prompt, given["timeout_ms"]))
        return SimpleNamespace(wait=lambda: SimpleNamespace(tokens=0))

    engine = SimpleNamespace(prompt=Prompt, load=load, lookup=lambda prompt: calls.append(prompt) or 15, close=lambda: None)
    of = Dimensions(1, 1, 4, torch.float32)
    segments = Segments(engine, of, [])
    first, second = segments.chains(list(range(10)), [[1] * 5, [2] * 7])
    assert (segments.has(first), segments.has(second)) == (True, False)
    assert not segments.begin(first, Rows(of, 20, torch.device("cpu")), 10, False, 1234).result()
    assert calls == [10, "10 and 5", "10 and 7", ("10 and 5", 1234)]
    segments.close()


def test_no_load_waits_for_stores() -> None:
    drive = threading.Event()
    loaded = SimpleNamespace(wait=lambda: SimpleNamespace(tokens=15))
    stored = SimpleNamespace(wait=lambda: drive.wait() and SimpleNamespace(stored=1, sheds={}))
    engine = SimpleNamespace(load=lambda *_, **__: loaded, store=lambda *_, **__: stored, lookup=lambda _: 15, close=lambda: None)
    of = Dimensions(1, 1, 4, torch.float32)
    segments, rows = Segments(engine, of, []), Rows(of, 20, torch.device("cpu"))
    chain = Chain(list(range(10)), [1] * 5, "prompt")
    try:
        # More of them than threads that load: their requests were aborted.
        stores = [segments.store(chain, rows) for _ in range(AT_ONCE + 1)]
        assert segments.begin(chain, rows, 10, False, 1234).result(120)
    finally:
        drive.set()
    assert [store.result(120) for store in stores] == [None] * len(stores)
    segments.close()


def test_one_line_says_which_segments_of_a_blend_are_computed(log: pytest.LogCaptureFixture) -> None:
    of: Any = object.__new__(Blender)
    of._quiet = Quiet(logging.getLogger("blends"))
    with log.at_level(logging.INFO):
        for states in (["reused"] * 3, ["missing", "reused", "missing"], ["missing", "reused"], ["gate", "missing"]):
            of._report(states)
    assert [record.getMessage() for record in log.records] == [
        "of 3 segments of a blend these are computed: 2 missing",
        "of 2 segments of a blend these are computed: 1 gate, 1 missing",
    ]


@pytest.mark.parametrize("fails", ["side", "blends", "flush", "close", ""])
def test_a_shutdown_closes_everything_whatever_fails(fails: str, log: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []

    def end(name: str) -> Any:
        def ended() -> None:
            closed.append(name)
            if name == fails:
                raise OSError("its drive is gone")

        return ended

    half: Any = object.__new__(working.WorkerHalf)
    half._side, half._blends = SimpleNamespace(shutdown=end("side")), SimpleNamespace(close=end("blends"))
    half._engine = SimpleNamespace(is_up=True, flush=end("flush"), close=end("close"))
    for _ in range(2):
        half.shutdown()
    assert closed == ["side", "blends", "flush", "close"]
    assert log.text.count("its drive is gone") == (1 if fails else 0)


def test_a_cache_that_never_opened_has_nothing_to_lose(log: pytest.LogCaptureFixture) -> None:
    half: Any = object.__new__(working.WorkerHalf)
    half._side, half._blends, closed = None, None, list[str]()
    half._engine = SimpleNamespace(is_up=False, flush=lambda: 1 / 0, close=lambda: closed.append("engine"))
    half.shutdown()
    assert (closed, log.text) == (["engine"], "")


def test_segments_are_uploaded_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("forebay.Engine", lambda settings, *_, **__: given.append(settings))
    for part in ("refuse", "identity", "Nested", "Ranks", "Segments", "_dimensions", "_rotary"):
        monkeypatch.setattr(blender, part, MagicMock())
    settings = SimpleNamespace(engine={"cache_dir": "/a", "remote_url": "s3://bucket"}, resolved={"load_timeout_ms": 2000})
    Blender(MagicMock(), SimpleNamespace(settings=settings))  # type: ignore[arg-type]
    assert given == [{"cache_dir": "/a", "remote_url": "none"}]


def test_a_worker_whose_model_is_not_found_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="MultiConnector"):
        runner_of(SimpleNamespace())
