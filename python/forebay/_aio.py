"""Loads and stores for asyncio: the event loop watches a descriptor, and no thread waits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from forebay._forebay import LayerReady, Load, Result, Store, StoreResult


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    # The loop has one reader for each descriptor: another task may wait for the same.
    own = os.dup(fd)
    loop.add_reader(own, lambda: done.done() or done.set_result(None))
    try:
        await done
    finally:
        loop.remove_reader(own)
        os.close(own)


async def layers(load: Load) -> AsyncIterator[LayerReady]:
    """The layers of a load in order, as they land."""
    while True:
        over, ready, landing = load._poll()
        if over:
            return
        if ready is None:
            await _readable(load._fd)
            continue
        if landing is not None:
            # An accelerator copies, and no stream waits for it. The thread must not keep the load:
            # dropping it cancels it.
            try:
                await asyncio.to_thread(landing)
            except asyncio.CancelledError:
                load._give_back(ready.layer)
                raise
        yield ready


async def result(load: Load) -> Result:
    """The result of a load, once it has finished."""
    while (found := load._poll_result()) is None:
        await _readable(load._end_fd)
    return found


async def stored(store: Store) -> StoreResult:
    """The result of a store, once it is over."""
    while (found := store._poll()) is None:
        await _readable(store._fd)
    return found
