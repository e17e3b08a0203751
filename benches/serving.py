"""What vLLM gains: real vLLM on this machine's CPU, with Forebay and without, beside fio on the same file.

    PYTHONPATH=tests/vllm:benches python benches/serving.py --folder DIR [--rounds 5] [--tokens 4096]

needs vLLM, the release wheel (`make wheel`) in this Python, and fio. Shown, as medians of rounds whose parts run in turn:

- time to the first token of long prompts: computed; loaded by a server that was started anew; and when vLLM has all but the last block in
  its own cache (the tail), which bounds what a load can reach: bytes / fio's rate + the tail;
- tokens loaded per second when all prompts come at once and are stored, whose tails vLLM computes meanwhile on the same cores (how fast the
  connector loads without a model is what connector_load.py shows);
- requests per second with new prompts (nothing hits, everything is stored), with and without Forebay, and with stored ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import peer
from conftest import environment
from demo import ask
from peer import show
from test_server import Server, server

HITS = "vllm:external_prefix_cache_hits"


def reset(to: Server) -> None:
    """vLLM forgets its own prefix cache; Forebay's stays."""
    urllib.request.urlopen(urllib.request.Request(to.base + "/reset_prefix_cache", b""), timeout=60).read()


def together(to: Server, asked: list[list[int]], max_tokens: int) -> float:
    """Seconds until all prompts, sent at once, are answered."""

    def one(prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            to.base + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=900).read()

    began = time.perf_counter()
    with ThreadPoolExecutor(len(asked)) as clients:
        list(clients.map(one, asked))
    return time.perf_counter() - began


def settled(to: Server) -> None:
    """Waits until what the server stores is counted as stored."""
    before = -1.0
    while (now := to.metric("vllm:forebay_stored_tokens")) != before:
        before = now
        time.sleep(0.5)
        to.complete([5, 6, 7, 8])


class Bench:
    """One run of all measurements."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Makes the model and the prompts."""
        self.options, self.folder = options, options.folder.resolve()
        self.model = self.folder / "model"
        if not (self.model / "config.json").exists():
            command = [sys.executable, Path(sys.modules["demo"].__file__).parent / "model.py", self.model, "float32", "speed"]
            subprocess.run(command, check=True, env=environment(self.folder))
        config = json.loads((self.model / "config.json").read_text())
        self.token_bytes = 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        self.source = random.Random(options.seed)
        self.long = [self.prompt(options.tokens) for _ in range(options.rounds)]
        limit = str(options.tokens + 64)
        self.arguments = ("--max-model-len", limit, "--max-num-batched-tokens", limit)
        self.cache = {"cache_dir": str(self.folder / "cache"), "capacity": "8GiB"}

    def prompt(self, tokens: int) -> list[int]:
        return [self.source.randrange(4, 512) for _ in range(tokens)]

    def cold(self) -> list[float]:
        """Times to the first token that is computed."""
        times = []
        with server(self.folder, str(self.model), self.cache, self.arguments) as running:
            ask(running, self.prompt(16))
            for prompt in self.long:
                times.append(ask(running, prompt)[0])
            settled(running)
        return times

    def warm(self, cold: list[float], loading: Server) -> None:
        """The same prompts, by a server that was started since."""
        ask(loading, self.prompt(16))
        file = peer.data(self.folder / "cache")
        point = peer.best(file)
        before, warm, tails, rates = loading.metric(HITS), [], [], []
        for prompt in self.long:
            rates.append(peer.rate(file, point))
            warm.append(ask(loading, prompt)[0])
            tails.append(ask(loading, prompt)[0])
        loaded = (loading.metric(HITS) - before) / len(self.long)
        print(f"prompts of {self.options.tokens} tokens, {loaded:.0f} loaded of each ({loaded * self.token_bytes / 2**20:.0f} MiB)")
        show("time to first token, computed", cold, "s")
        show("time to first token, loaded after a restart", warm, "s")
        show("time to first token, all in vLLM's own cache (tail)", tails, "s")
        show("fio beside it", [r / 1e9 for r in rates], "GB/s")
        show("loaded / computed (target <= 0.2)", [w / c for w, c in zip(warm, cold, strict=True)])
        bounds = [loaded * self.token_bytes / r + t for r, t in zip(rates, tails, strict=True)]
        show("loaded / (bytes / fio + tail) (target <= 1.25)", [w / b for w, b in zip(warm, bounds, strict=True)])
        self.all_hits(loading, file, point)

    def all_hits(self, loading: Server, file: Path, point: tuple[str, int]) -> None:
        """All stored prompts at once, one token each; then once more, when all but their last blocks are in vLLM's own cache."""
        bounds, rates = [], []
        for _ in range(self.options.rounds):
            reset(loading)
            before, rate = loading.metric(HITS), peer.rate(file, point)
            took = together(loading, self.long, 1)
            loaded = loading.metric(HITS) - before
            tails = together(loading, self.long, 1)
            rates.append(loaded / took)
            bounds.append(took / (loaded * self.token_bytes / rate + tails))
        show("all prompts at once: loaded tokens per second", rates)
        show("their time / (bytes / fio + the same without loads)", bounds)

    def throughput(self, loading: Server) -> None:
        """Requests per second, with and without Forebay."""
        count, tokens, generated = self.options.clients, self.options.tokens // 4, 16
        fresh, hits = [], []
        with server(self.folder, str(self.model), None, self.arguments) as bare:
            together(bare, [self.prompt(64)], 4)
            for _ in range(self.options.rounds):
                asked = [self.prompt(tokens) for _ in range(count)]
                without = together(bare, asked, generated)
                fresh.append(without / together(loading, asked, generated))
                settled(loading)
                reset(loading)
                hits.append(without / together(loading, asked, generated))
        name = f"{count} clients, {tokens} + {generated} tokens, requests per second with Forebay / without"
        show(f"{name}, new", fresh)
        show(f"{name}, stored", hits)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the drive to be used; keeps model and cache")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    # For /reset_prefix_cache.
    os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}", flush=True)
    bench = Bench(options)
    cold = bench.cold()
    with server(bench.folder, str(bench.model), bench.cache, bench.arguments) as loading:
        bench.warm(cold, loading)
        bench.throughput(loading)


if __name__ == "__main__":
    main()
