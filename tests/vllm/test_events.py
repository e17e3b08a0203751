"""KV events as another program receives them: over ZMQ, with vLLM's own block hashes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from conftest import generate, prompts, settings
from test_damage import flip_bits
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

BLOCK = 32
CHUNK = 64
#: A block as events describe it: the hash of the one before it, and its tokens.
Block = tuple[Any, tuple[int, ...]]


class Subscriber:
    """What a publisher sent."""

    def __init__(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        # The publisher connects, so that nothing is lost before a subscriber has found it.
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.events: list[Any] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while self._socket.poll(200) or not self._ended.is_set():
            if self._socket.poll(0):
                _, _, payload = self._socket.recv_multipart()
                self.events.extend(decoder.decode(payload).events)

    def close(self) -> None:
        """Takes what has arrived, then ends."""
        self._ended.set()
        self._thread.join()
        self._socket.close()

    def stored(self, medium: str) -> list[BlockStored]:
        """Blocks announced."""
        found = [e for e in self.events if isinstance(e, BlockStored) and e.medium == medium]
        assert medium != "STORAGE" or {e.locality for e in found} <= {"LOCAL"}
        return found

    def removed(self) -> list[BlockRemoved]:
        """Blocks taken back from the drives."""
        found = [e for e in self.events if isinstance(e, BlockRemoved) and e.medium == "STORAGE"]
        assert {e.locality for e in found} <= {"LOCAL"}
        return found


@contextmanager
def subscriber() -> Iterator[Subscriber]:
    """One that listens."""
    made = Subscriber()
    try:
        yield made
    finally:
        made.close()


def blocks(events: list[BlockStored]) -> dict[Any, Block]:
    """Every block of these events by its hash."""
    found: dict[Any, Block] = {}
    for event in events:
        assert event.block_size == BLOCK
        assert len(event.token_ids) == BLOCK * len(event.block_hashes)
        parent = event.parent_block_hash
        for i, block in enumerate(event.block_hashes):
            found[block] = (parent, tuple(event.token_ids[i * BLOCK : (i + 1) * BLOCK]))
            parent = block
    return found


def run(folder: Path, gemma: str, cache: Path, **more: Any) -> Subscriber:
    """A server that tells a subscriber; what that has received."""
    with subscriber() as listening:
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": listening.endpoint}
        engine = {"block_size": BLOCK, "disable_hybrid_kv_cache_manager": False, "kv_events_config": events}
        asked = {"model": gemma, "prompts": prompts(2), "cache": settings(cache, chunk_size=CHUNK), "engine": engine}
        generate(folder, **asked, rounds=3, **more)
    return listening


@pytest.fixture(scope="module")
def gemma(models: Callable[..., str]) -> str:
    """Several KV cache groups."""
    return models("float32", "gemma")


def full_blocks() -> int:
    """Different blocks of whole chunks in the prompts."""
    seen = {tuple(p[: i + BLOCK]) for p in prompts(2) for i in range(0, len(p) // CHUNK * CHUNK, BLOCK)}
    return len(seen)


def test_what_is_stored_found_lost_and_cleared_is_told(gemma: str, tmp_path: Path) -> None:
    told = run(tmp_path, gemma, tmp_path / "cache", reset_connector=True)
    computed = blocks([event for event in told.stored("GPU") if event.kv_cache_spec_kind == "full_attention"])
    stored = blocks(told.stored("STORAGE"))
    assert len(stored) == full_blocks()
    assert stored.items() <= computed.items(), "other hashes, parents or tokens than vLLM's own"
    groups = {event.group_idx: (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in told.stored("STORAGE")}
    assert sorted(groups) == [0, 1, 2, 3]
    assert sorted(map(str, groups.values())) == sorted([str(("full_attention", None))] + 3 * [str(("sliding_window", 64))])
    assert told.removed() == []
    # vLLM tells of its own two resets, the connector of the one that was its too; nothing is served
    # after it.
    cleared = [i for i, event in enumerate(told.events) if isinstance(event, AllBlocksCleared)]
    assert len(cleared) == 3
    assert not any(isinstance(e, BlockStored) and e.medium == "STORAGE" for e in told.events[cleared[-1] :])

    # Another process finds the chunks, cannot load them, and stores them again.
    shutil.copytree(tmp_path / "cache", tmp_path / "damaged")
    flip_bits(tmp_path / "damaged")
    told = run(tmp_path, gemma, tmp_path / "damaged")
    again = blocks(told.stored("STORAGE"))
    assert again == stored
    lost = [block for event in told.removed() for block in event.block_hashes]
    assert lost and set(lost) <= set(stored)
    first = lost[0]
    story = [
        type(e).__name__
        for e in told.events
        if isinstance(e, BlockStored | BlockRemoved) and e.medium == "STORAGE" and first in e.block_hashes and e.group_idx == 0
    ]
    assert story == ["BlockStored", "BlockRemoved", "BlockStored"]
