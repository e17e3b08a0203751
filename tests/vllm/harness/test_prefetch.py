"""What is stored of requests that wait is in the workers' memory when they begin, and goes with them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from .server import HANGS_S, Server, Shape

#: Nothing is given up, however slow this machine is.
SETTINGS = {"max_held_blocks": 1000, "gather_patience_ms": 20_000, "load_timeout_ms": 60_000}
AHEAD = SETTINGS | {"local_cpu": True, "max_local_cpu_size": "4MiB"}
#: Of 100 tokens three chunks of 32 are stored.
PROMPTS = [[4 + i * (7 + 2 * n) % 500 for i in range(100)] for n in range(5)]


def stored(folder: Path, device: str, **shape: Any) -> None:
    """Stores all prompts."""
    server = Server(Shape(device=device, settings=SETTINGS, **shape), folder)
    for n, prompt in enumerate(PROMPTS):
        server.ask(f"store {n}", prompt, 1)
        server.drain()
        server.until_stored(prompt, 96)
    server.close()


def counts(server: Server) -> list[dict[str, Any]]:
    """What each worker has counted."""
    return [rank.connector._worker.stats() for rank in server.runner.ranks]


def begin(server: Server, req_id: str = "first", prompt: list[int] = PROMPTS[0]) -> None:
    """A request runs: there is no room for others."""
    server.ask(req_id, prompt, 40)
    while not server.asked[req_id].output:
        server.step()


def until_read(server: Server, chunks: int) -> None:
    """Waits until every worker has read so many chunks ahead."""
    began = time.monotonic()
    while any(of["prefetched_chunks"] < chunks for of in counts(server)):
        assert time.monotonic() - began < HANGS_S, counts(server)
        time.sleep(0.001)


@pytest.mark.parametrize("layerwise", [False, True], ids=["between-steps", "layerwise"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_waiting_requests_are_loaded_from_memory(tmp_path: Path, device: str, ranks: int, layerwise: bool) -> None:
    stored(tmp_path, device, ranks=ranks)
    # One request at a time: the others wait for it.
    policy: dict[str, Any] = {"policy": "fail"} if layerwise else {}
    settings = AHEAD | {"use_layerwise": layerwise}
    server = Server(Shape(device=device, ranks=ranks, max_requests=1, settings=settings, **policy), tmp_path)
    begin(server)
    for n, prompt in enumerate(PROMPTS[1:]):
        server.ask(f"waits {n}", prompt, 4)
    server.step()
    until_read(server, 3 * 4)
    assert server.scheduler.requests["waits 0"].status == RequestStatus.WAITING
    server.drain()
    server.check_outputs()
    server.check_empty()
    for of in counts(server):
        assert of["memory_hits"] == of["prefetch_used_chunks"] == of["prefetched_chunks"] == 12, of
        assert of["prefetch_wasted_chunks"] == 0
    assert server.scheduler.connector._scheduler.stats()["scheduler_prefetches"] == 4
    server.close()


def test_aborted_requests_and_what_vllm_has_itself_are_let_go(tmp_path: Path, device: str) -> None:
    stored(tmp_path, device)
    server = Server(Shape(device=device, max_requests=1, settings=AHEAD), tmp_path)
    begin(server)
    server.ask("aborted", PROMPTS[1], 4)
    server.step()
    until_read(server, 3)
    server.abort("aborted")
    server.drain()
    server.check_outputs()
    server.check_empty()
    for rank in server.runner.ranks:
        engine = rank.connector._worker._engine
        assert engine.stats()["prefetch"]["held_bytes"] == 0 and engine.stats()["prefetch"]["active"] == 0
    # What vLLM's own prefix cache has is not read ahead, whoever waits.
    begin(server, "second", PROMPTS[2])
    server.ask("cached", PROMPTS[0], 4)
    server.drain()
    server.check_outputs()
    assert server.scheduler.connector._scheduler.stats()["scheduler_prefetches"] == 1
    assert [of["prefetched_chunks"] for of in counts(server)] == [3, 3]
    server.close()


@pytest.mark.parametrize("off", [{"local_cpu": False}, {"prefetch": False}], ids=["no-memory", "switched-off"])
def test_switched_off_nothing_is_read_ahead(tmp_path: Path, device: str, off: dict[str, Any]) -> None:
    stored(tmp_path, device)
    server = Server(Shape(device=device, max_requests=1, settings=AHEAD | off), tmp_path)
    begin(server)
    for n, prompt in enumerate(PROMPTS[1:]):
        server.ask(f"{n}", prompt, 4)
    server.drain()
    server.check_outputs()
    assert server.loaded_tokens == 5 * 96
    assert server.scheduler.connector._scheduler.stats()["scheduler_prefetches"] == 0
    assert [of["prefetched_chunks"] for of in counts(server)] == [0, 0]
    server.close()
