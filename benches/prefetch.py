#!/usr/bin/env python3
"""What a prefetch brings, and what it costs others: loads of a prompt that was read ahead, and loads of other prompts meanwhile.

Needs the package `forebay` (`make wheel`). Three kinds of loads take turns, so that all see the same drive: alone, while another
prompt is being read ahead all the time, and after their own prefetch. Loads come at a fixed rate, as requests do. Prints a line of JSON.
Nothing here asserts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import threading
import time
from typing import Any

import forebay

CHUNK, BLOCK, LAYERS, HEADS, DIM = 256, 16, 32, 8, 128
#: Bytes of one chunk of Llama 3.1 8B in 16 bits.
CHUNK_BYTES = CHUNK * LAYERS * 2 * HEADS * DIM * 2


def memory(tokens: int, fill: int) -> list[memoryview]:
    """Paged KV for one prompt."""
    shape = (2, tokens // BLOCK, BLOCK, HEADS, DIM)
    size = 2 * tokens * HEADS * DIM * 2
    return [memoryview(bytearray([fill]) * size).cast("H", shape) for _ in range(LAYERS)]


def prompt(number: int, tokens: int) -> list[int]:
    """Token ids that no other number has."""
    return [number * 100_000 + i for i in range(tokens)]


class Background:
    """Reads other prompts ahead, one after the other, while it is switched on."""

    def __init__(self, engine: forebay.Engine, prompts: list[Any]) -> None:
        """Off at first."""
        self.on, self.stop = threading.Event(), False
        self.thread = threading.Thread(target=self._run, args=(engine, itertools.cycle(prompts)))
        self.thread.start()

    def _run(self, engine: forebay.Engine, prompts: Any) -> None:
        while not self.stop:
            self.on.wait()
            # Dropped when it has ended: others take its place in memory.
            engine.prefetch(next(prompts)).wait()

    def end(self) -> None:
        """When its prefetch is over."""
        self.stop = True
        self.on.set()
        self.thread.join()


def load_ms(engine: forebay.Engine, tokens: Any, kv: Any, slots: list[int]) -> float:
    """Milliseconds of one load."""
    began = time.perf_counter()
    done = engine.load(tokens, kv, slots).wait()
    assert done.tokens == len(slots), done
    return (time.perf_counter() - began) * 1000


def figures(times: list[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    times = sorted(times)
    return {"p50": round(statistics.median(times), 2), "p99": round(times[int(len(times) * 0.99)], 2)}


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="a directory on the drive")
    parser.add_argument("--chunks", type=int, default=2, help="chunks of a load, 32 MiB each")
    parser.add_argument("--loads", type=int, default=200, help="loads of each kind")
    parser.add_argument("--every-ms", type=float, default=100, help="a load begins so often")
    args = parser.parse_args()
    # Both halves of the prompts have twice the chunks that memory holds: a prompt has left it when
    # its turn comes again.
    frames, tokens = 12 * args.chunks, args.chunks * CHUNK
    folder = tempfile.mkdtemp(dir=args.dir, prefix="forebay-prefetch-")
    config = {"cache_dir": folder, "local_cpu": True, "max_local_cpu_size": f"{frames * 33}MiB"}
    config |= {"capacity": f"{96 * args.chunks * 33}MiB", "on_open_failure": "fail"}
    slots, times = list(range(tokens)), {"alone": [], "beside": [], "after": []}
    with forebay.Engine(config, forebay.Geometry.preset("llama-3.1-8b")) as engine:
        target = engine.paged_kv(memory(tokens, 0))
        prompts = [engine.prompt(prompt(n, tokens)) for n in range(48)]
        for n, each in enumerate(prompts):
            engine.store(each, memory(tokens, 1 + n % 200), slots, wait_for_staging=True).wait()
        background = Background(engine, prompts[24:])
        mine, next_at = itertools.cycle(prompts[:24]), time.perf_counter()
        for n in range(3 * args.loads):
            kind = ("alone", "beside", "after")[n % 3]
            each = next(mine)
            ahead = engine.prefetch(each) if kind == "after" else None
            if kind == "beside":
                background.on.set()
            next_at += args.every_ms / 1000
            time.sleep(max(0.0, next_at - time.perf_counter()))
            if ahead is not None:
                ahead.wait()
            times[kind].append(load_ms(engine, each, target, slots))
            background.on.clear()
            if ahead is not None:
                ahead.cancel()
        background.end()
        stats = engine.stats()["prefetch"]
    shutil.rmtree(folder)
    result = {kind: figures(of) for kind, of in times.items()}
    result["p99 beside / alone"] = round(result["beside"]["p99"] / result["alone"]["p99"], 3)
    result["p50 after / alone"] = round(result["after"]["p50"] / result["alone"]["p50"], 3)
    print(json.dumps(result | {"load_mib": args.chunks * CHUNK_BYTES >> 20, "loads": args.loads, "prefetch": stats}))


if __name__ == "__main__":
    main()
