#!/usr/bin/env python3
"""Loads from the memory tier by the process that has the memory, and by another one that shares it.

Needs the package `forebay` (`make wheel`). Both load the same prompt from memory, in turns. Prints a line of JSON with bytes per
second of each, the median of the rounds, and their ratio. `cargo bench --bench cpu_reference` has what a CRC and a copy alone reach
(`memory_bytes_per_s`). Nothing here asserts but that the loads come from memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import forebay

from prefetch import CHUNK, CHUNK_BYTES, memory


class Loader:
    """A process's view of the cache."""

    def __init__(self, config: dict[str, Any], tokens: int) -> None:
        """Opens it."""
        self.slots = list(range(tokens))
        self.engine = forebay.Engine(config, forebay.Geometry.preset("llama-3.1-8b"))
        self.prompt, self.kv = self.engine.prompt(self.slots), self.engine.paged_kv(memory(tokens, 0))

    def rate(self, loads: int) -> float:
        """Bytes per second of so many loads."""
        began = time.perf_counter()
        for _ in range(loads):
            assert self.engine.load(self.prompt, self.kv, self.slots).wait().tokens == len(self.slots)
        return loads * len(self.slots) // CHUNK * CHUNK_BYTES / (time.perf_counter() - began)

    def misses(self) -> int:
        """Chunks that did not come from memory so far."""
        return self.engine.stats()["memory"]["misses"]


def other(config: dict[str, Any], tokens: int, pipe: Connection) -> None:
    """The process that has no memory of its own."""
    loader = Loader(config, tokens)
    # It has the other process's memory some time after its start.
    while loader.engine.stats()["memory"]["hits"] == 0:
        loader.rate(1)
    pipe.send(None)
    while (loads := pipe.recv()) is not None:
        pipe.send((loader.rate(loads), loader.misses()))
    loader.engine.close()


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="a directory on the drive")
    parser.add_argument("--chunks", type=int, default=16, help="chunks of a load, 32 MiB each")
    parser.add_argument("--loads", type=int, default=4, help="loads of a round")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    tokens = args.chunks * CHUNK
    folder = tempfile.mkdtemp(dir=args.dir, prefix="forebay-attached-")
    config = {"cache_dir": folder, "local_cpu": True, "max_local_cpu_size": f"{(args.chunks + 2) * 34}MiB"}
    config |= {"capacity": f"{(args.chunks + 32) * 33}MiB", "on_open_failure": "fail"}
    own = Loader(config, tokens)
    own.engine.store(own.prompt, memory(tokens, 7), own.slots, wait_for_staging=True).wait()
    own.rate(2)
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=other, args=(config, tokens, theirs))
    process.start()
    # It holds the other end alone, so that its death ends the wait.
    theirs.close()
    mine.recv()
    rates: dict[str, list[float]] = {"own": [], "attached": []}
    misses = own.misses(), 0
    for n in range(args.rounds + 1):
        of_own = own.rate(args.loads)
        mine.send(args.loads)
        of_other, missed = mine.recv()
        if n == 0:
            # The first round maps the memory.
            misses = own.misses(), missed
            continue
        rates["own"].append(of_own)
        rates["attached"].append(of_other)
    assert (own.misses(), missed) == misses, "loads that were not from memory"
    mine.send(None)
    process.join()
    own.engine.close()
    shutil.rmtree(folder)
    ratio = statistics.median(b / a for a, b in zip(rates["own"], rates["attached"]))
    of = {f"{name}_bytes_per_s": round(statistics.median(all_rates)) for name, all_rates in rates.items()}
    print(json.dumps(of | {"attached / own": round(ratio, 3), "load_mib": args.chunks * CHUNK_BYTES >> 20, "rounds": args.rounds}))


if __name__ == "__main__":
    main()
