"""What stores that keep evicting cost the loads of a full cache: loads alone, and beside them, in turns.

    python benches/reclaim.py --folder DIR [--rounds 7] [--seconds 4] [--store-mb 50] [--capacity-gb 4]

needs the release wheel (`make wheel`) in this Python, numpy, and one and a half times the capacity free on DIR's drive. The cache
is filled to its capacity, and stores go on until it has evicted as much as it holds. Loads ask for chunks that are
there, one prompt of eight chunks after the other, two at once; every byte is verified. Stores come at the given rate. Shown is the loads' rate with stores over the
rate without, the median of all rounds.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import forebay
import numpy

#: 128 KiB of KV per token, as Llama 3.1 8B in bf16.
LAYERS, KV_HEADS, HEAD_SIZE, CHUNK, BLOCK = 32, 8, 128, 256, 16
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_SIZE * 2
PROMPT = 8 * CHUNK
LOADERS = 2


class Cache:
    """An engine at its capacity, and the prompts that were stored last."""

    def __init__(self, folder: Path, capacity_gb: float, seed: int) -> None:
        geometry = forebay.Geometry(
            model="reclaim", layers=LAYERS, kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype="float16", fingerprint=f"seed {seed}"
        )
        settings = {"cache_dir": str(folder), "capacity": f"{capacity_gb}GiB", "min_free": 0, "chunk_size": CHUNK}
        self.engine = forebay.Engine(settings, geometry)
        self.random = random.Random(seed)
        self.slots = numpy.arange(PROMPT, dtype=numpy.int64)
        self.source = self._memory(1)
        self.prompts: list[Any] = []
        self.capacity = int(capacity_gb * 2**30)

    @staticmethod
    def _memory(fill: int) -> list[Any]:
        shape = (2, PROMPT // BLOCK, BLOCK, KV_HEADS, HEAD_SIZE)
        return [numpy.full(shape, fill, dtype=numpy.float16) for _ in range(LAYERS)]

    def store(self) -> None:
        """A new prompt."""
        prompt = self.engine.prompt([self.random.randrange(1 << 17) for _ in range(PROMPT)])
        result = self.engine.store(prompt, self.source, self.slots).wait()
        if result.stored == PROMPT // CHUNK:
            self.prompts.append(prompt)

    def fill(self) -> None:
        """Until it has evicted as much as it holds."""
        until = time.monotonic() + 600
        while self.engine.stats()["log"]["evicted"] * CHUNK * TOKEN_BYTES < self.capacity:
            if time.monotonic() > until:
                raise SystemExit(f"nothing more is evicted: {self.engine.stats()['log']}")
            self.store()
        self.engine.flush()

    def loaded(self, seconds: float, seed: int) -> float:
        """Bytes per second of loads of prompts that are there whole."""
        self.prompts = [p for p in self.prompts if self.engine.lookup(p) == PROMPT]
        counts, until = [0] * LOADERS, time.monotonic() + seconds

        def work(number: int) -> None:
            mine, memory = random.Random(seed * LOADERS + number), self._memory(0)
            while time.monotonic() < until:
                # Of the younger half, which is not evicted meanwhile.
                prompt = mine.choice(self.prompts[len(self.prompts) // 2 :])
                counts[number] += self.engine.load(prompt, memory, self.slots).wait().tokens * TOKEN_BYTES

        began = time.monotonic()
        threads = [threading.Thread(target=work, args=(n,)) for n in range(LOADERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / (time.monotonic() - began)

    def storing(self, rate: float, stop: threading.Event) -> None:
        """Stores at `rate` bytes per second until told to stop."""
        began, stored = time.monotonic(), 0
        while not stop.is_set():
            self.store()
            stored += PROMPT * TOKEN_BYTES
            stop.wait(max(0.0, began + stored / rate - time.monotonic()))


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the drive to be used; a folder that is not there yet")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--store-mb", type=float, default=50.0, help="bytes stored beside the loads, in 10^6 per second")
    parser.add_argument("--capacity-gb", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} is there already: give a folder that is not, or remove it")
    options.folder.mkdir(parents=True)
    cache = Cache(options.folder, options.capacity_gb, options.seed)
    try:
        cache.fill()
        ratios = []
        for number in range(options.rounds):
            alone = cache.loaded(options.seconds, 2 * number)
            before, stop = cache.engine.stats()["log"]["evicted"], threading.Event()
            storer = threading.Thread(target=cache.storing, args=(options.store_mb * 1e6, stop))
            storer.start()
            beside = cache.loaded(options.seconds, 2 * number + 1)
            stop.set()
            storer.join()
            gone = cache.engine.stats()["log"]["evicted"] - before
            ratios.append(beside / alone)
            print(f"round {number}: alone {alone / 1e9:.2f} GB/s, beside stores {beside / 1e9:.2f} GB/s, {gone} chunks evicted", flush=True)
        log = cache.engine.stats()["log"]
        print(f"loads beside stores / alone: median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print(f"evicted {log['evicted']}, bad {log['bad_chunks']}")
    finally:
        cache.engine.close()
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
