"""The external linker while others store several times what the cache holds: what was promised is loaded whole, whatever else goes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from linked import PAGE, PATIENCE_S, Server, prompt, served
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from test_linker import MORE, queued
from world import names

#: The least that there is. What was promised is kept for as long as a load may take.
CAPACITY = 16 << 20
SMALL = {"capacity": CAPACITY, "load_timeout_ms": 1000 * PATIENCE_S}
TIMES, BATCH = 3, 16


def press(server: Server, salts: Any) -> None:
    """Has SGLang's call store pages of others, of each kind, until they are several times what the cache holds."""
    sources = server.linker._sources
    slots = {name: server.allocator.alloc(BATCH * PAGE) if name == PoolName.KV else torch.arange(BATCH) for name in sources}
    stored = lambda: sources[PoolName.KV].engine.stats()["stored_bytes"]  # noqa: E731
    until = stored() + TIMES * CAPACITY
    while stored() < until:
        keys = names(BATCH, f"{next(salts):04x}")
        assert server.linker.offload([PoolTransfer(name=name, keys=keys, device_indices=of) for name, of in slots.items()])
        assert server.linker._saver.idle(PATIENCE_S)
        for store, _ in server.linker._offloads[-1].stores:
            store.wait()
        server.linker.pop_completed_offload()
    server.allocator.free(slots[PoolName.KV])


def found(server: Server, salt: int) -> int:
    return server.match(server.request([*prompt(5, salt), *MORE]))


@pytest.mark.parametrize("moment", ["before the load", "before the start"])
@pytest.mark.parametrize("kind", ["dsa", "hybrid"])
def test_what_was_promised_is_loaded_whole_though_everything_else_is_evicted(cache: Path, kind: str, moment: str) -> None:
    salts = itertools.count(1)
    with served(cache, kind, more=SMALL) as server:
        stored = [server.compute(prompt(5, salt), seed=salt) for salt in (1, 2)]
        assert server.settle() == [True, True]
    with served(cache, kind, more=SMALL) as server:
        req = server.request([*prompt(5, 1), *MORE])
        assert server.match(req) == 5 * PAGE
        if moment == "before the load":
            press(server, salts)
        assert server.admit(req) == 5 * PAGE
        if moment == "before the start":
            press(server, salts)
        assert all(source.engine.stats()["log"]["evicted"] for source in server.linker._sources.values())
        assert server.forward([req], keep=[req]) == [] and server.seen[req.rid] == stored[0]
        # Of the other prompt, which nobody had asked for, pages have gone.
        assert found(server, 2) < 5 * PAGE


def test_what_leases_cannot_protect_is_computed(cache: Path) -> None:
    # A lease for a page or two of five.
    few = SMALL | {"lease_share": 0.01}
    with served(cache, more=few) as server:
        stored = server.compute(prompt(5, 1), seed=1)
        assert server.settle() == [True]
    with served(cache, more=few) as server:
        req = server.request([*prompt(5, 1), *MORE])
        assert server.match(req) == 5 * PAGE
        free = server.allocator.available_size()
        # Once it were queued it could be evicted, and the request would end with an error.
        assert server.admit(req) == 0 and server.allocator.available_size() == free
        press(server, itertools.count(1))
        assert server.forward([req]) == []
    with served(cache, more={"capacity": CAPACITY}) as server:
        if pages := found(server, 1):
            req = queued(server, prompt(5, 1)[:pages])
            assert server.forward([req], keep=[req]) == []
            assert all(a == b[: len(a)] for x, y in zip(server.seen[req.rid], stored) for a, b in zip(x, y))
