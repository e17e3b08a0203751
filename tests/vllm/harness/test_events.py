"""KV events in vLLM's own scheduler: what was announced is taken back when this server's workers evict it, without anybody asking for it."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from .kv import FIRST_TOKEN, VOCABULARY
from .server import Server, Shape

#: Prompts that fill the cache more than once: about 1300 chunks of 32 tokens fit into its 16 MiB.
PROMPTS, TOKENS = 80, 900


def prompts(seed: int) -> list[list[int]]:
    """Prompts that share nothing."""
    print(f"seed {seed}")
    source = random.Random(seed)
    return [[source.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(TOKENS)] for _ in range(PROMPTS)]


@pytest.mark.parametrize(("policy", "when"), [("prefix", "computed"), ("lru", "finished")])
def test_an_eviction_is_told_when_it_happens(tmp_path: Path, device: str, policy: str, when: str) -> None:
    patient = {"max_held_blocks": 1000, "gather_patience_ms": 20_000, "load_timeout_ms": 20_000}
    patient |= {"eviction_policy": policy, "store_when": when}
    server = Server(Shape(ranks=1, blocks=128, batch_tokens=1024, events=True, device=device, settings=patient), tmp_path)
    asked = prompts(5)
    for number, prompt in enumerate(asked):
        store(server, f"r{number}", prompt)
    server.check_outputs()
    until_told(server, asked[-1])
    served: set[Any] = set()
    removed = 0
    for event in server.events:
        assert event.medium == "STORAGE"
        hashes = set(event.block_hashes)
        if isinstance(event, BlockStored):
            served |= hashes
        else:
            assert isinstance(event, BlockRemoved)
            assert hashes <= served, "only what was announced is taken back"
            served -= hashes
            removed += len(hashes)
    assert removed > 200, f"{removed} blocks were taken back"
    # What is said to be served is, and what was taken back is not: prompts are looked at from the newest on.
    size = server.scheduler.kv_cache_manager.block_pool.hash_block_size
    for number in (PROMPTS - 1, 0):
        before = server.loaded_tokens
        server.reset()
        server.ask(f"again{number}", asked[number], 2)
        request = server.scheduler.requests[f"again{number}"]
        announced = [of in served for of in (hash_of(h) for h in request.block_hashes)]
        whole = next((i for i, there in enumerate(announced) if not there), len(announced)) * size
        server.drain()
        assert server.loaded_tokens - before == whole // 32 * 32, number
        # Whole segments go in the order of use; single chunks from the ends of prompts.
        assert policy != "lru" or (whole == 0) == (number == 0)
    server.close()


def test_an_eviction_whose_hashes_are_forgotten_is_told_when_a_prompt_misses_the_chunk(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.vllm.events.MAX_ANNOUNCED", 1)
    patient = {"max_held_blocks": 1000, "gather_patience_ms": 20_000, "load_timeout_ms": 20_000, "eviction_policy": "lru"}
    server = Server(Shape(ranks=1, blocks=128, batch_tokens=1024, events=True, device=device, settings=patient), tmp_path)
    asked = prompts(7)
    for number, prompt in enumerate(asked):
        store(server, f"r{number}", prompt)
    until_told(server, asked[-1])
    assert not any(isinstance(event, BlockRemoved) for event in server.events), "of evicted chunks nobody knows the hashes"
    before = server.loaded_tokens
    server.reset()
    server.ask("again", asked[0], 2)
    blocks = 32 // server.scheduler.kv_cache_manager.block_pool.hash_block_size
    first = [hash_of(of) for of in server.scheduler.requests["again"].block_hashes[:blocks]]
    server.drain()
    until(server, lambda: any(isinstance(event, BlockRemoved) for event in server.events))
    removed = [event.block_hashes for event in server.events if isinstance(event, BlockRemoved)]
    assert (server.loaded_tokens, removed) == (before, [first])
    server.check_outputs()
    server.close()


def test_an_upload_is_told_when_all_ranks_have_it_and_taken_back_when_a_fetch_misses_it(tmp_path: Path, device: str) -> None:
    (tmp_path / "store").mkdir()
    url = (tmp_path / "store").as_uri()
    patient = {"max_held_blocks": 1000, "gather_patience_ms": 20_000, "load_timeout_ms": 20_000, "remote_url": url}
    server = Server(Shape(ranks=2, blocks=128, batch_tokens=1024, events=True, device=device, settings=patient), tmp_path)
    asked = prompts(6)[0]
    store(server, "first", asked)
    full = TOKENS // 32 * 32

    def told(kind: type, locality: str) -> set[Any]:
        return {block for e in server.events if isinstance(e, kind) and e.locality == locality for block in e.block_hashes}

    until(server, lambda: len(told(BlockStored, "REMOTE")) * server.scheduler.kv_cache_manager.block_pool.hash_block_size >= full)
    assert told(BlockStored, "REMOTE") <= told(BlockStored, "LOCAL")
    stored = {e.locality: e for e in server.events if isinstance(e, BlockStored) and e.token_ids == asked[: len(e.token_ids)]}
    assert stored["REMOTE"].token_ids == stored["LOCAL"].token_ids
    assert stored["REMOTE"].medium == stored["LOCAL"].medium == "STORAGE"
    assert not told(BlockRemoved, "LOCAL") | told(BlockRemoved, "REMOTE")
    purge = [sys.executable, "-m", "forebay", "purge", str(tmp_path / "cache"), "--all", "--yes", "--remote", url]
    subprocess.run(purge, check=True)
    server.reset()
    server.ask("again", asked, 2)
    server.drain()
    first = set(stored["REMOTE"].block_hashes)
    until(server, lambda: first <= told(BlockRemoved, "REMOTE") and first <= told(BlockRemoved, "LOCAL"))
    assert told(BlockRemoved, "REMOTE") <= told(BlockStored, "REMOTE")
    # It is computed and stored anew, and so uploaded anew.
    until(server, lambda: [type(e) for e in server.events if e.locality == "REMOTE" and first <= set(e.block_hashes)][-1] is BlockStored)
    server.check_outputs()
    server.close()


def until(server: Server, is_told: Callable[[], bool]) -> None:
    """Steps until something is told: workers tell of what went on in the background with a later step."""
    for again in range(1000):
        if is_told():
            return
        server.ask(f"later{again}", [FIRST_TOKEN] * 20, 2)
        server.drain()
        time.sleep(0.02)
    raise AssertionError(f"it was never told; {server.events[-3:]}")


def store(server: Server, req_id: str, prompt: list[int]) -> None:
    """Asks a prompt, until all of it was stored: from a full cache it may be gone by then, as what never came back goes first."""
    engines = [rank.connector._worker._engine for rank in server.runner.ranks]
    stored, whole = sum(engine.stats()["stored_chunks"] for engine in engines), len(engines) * (TOKENS // 32)
    server.ask(req_id, prompt, 2)
    server.drain()
    while any(engine.stats()["active_stores"] for engine in engines):
        time.sleep(0.001)
    if sum(engine.stats()["stored_chunks"] for engine in engines) < stored + whole:
        server.until_stored(prompt, TOKENS // 32 * 32)


def until_told(server: Server, prompt: list[int]) -> None:
    """Until the last whole chunk of a prompt is announced, and nothing more is told for a while: workers tell of stores that are over, and of
    what was evicted for them in the background, with a later step."""
    end = prompt[TOKENS // 32 * 32 - 32 : TOKENS // 32 * 32]
    told, quiet = 0, 0
    for again in range(1000):
        server.ask(f"later{again}", prompt[:40], 2)
        server.drain()
        quiet = quiet + 1 if len(server.events) == told else 0
        told = len(server.events)
        if quiet >= 10 and any(isinstance(event, BlockStored) and event.token_ids[-32:] == end for event in server.events):
            return
        time.sleep(0.02)
    raise AssertionError("what was stored was never announced")


def hash_of(block_hash: Any) -> Any:
    """As events have it."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return maybe_convert_block_hash(block_hash)
