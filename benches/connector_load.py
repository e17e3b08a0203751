"""How fast the vLLM connector loads: vLLM's own scheduler, the connector in both roles, no model, beside fio on the same file.

    PYTHONPATH=tests/vllm:benches python benches/connector_load.py --folder DIR [--rounds 5] [--requests 8] [--tokens 4096]

needs vLLM, the release wheel (`make wheel`) in this Python, and fio. The prompts are stored, the server is started anew, and each round asks
for all of them at once (100 % hits); its clock runs from the first request to the last finished one.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import peer
import torch
from harness import server as world
from harness.runner import Rank
from peer import show

#: Layers, KV heads and head size in 4-byte elements: 64 KiB of KV per token, half of that of Llama
#: 3.1 8B in bf16.
LAYERS, KV_HEADS, HEAD_SIZE = 16, 8, 64
TOKEN_BYTES = 2 * 4 * LAYERS * KV_HEADS * HEAD_SIZE


def serve(options: argparse.Namespace) -> world.Server:
    """A server whose model computes nothing."""
    shape = world.Shape(
        ranks=1,
        depth=LAYERS,
        blocks=options.requests * (options.tokens // world.BLOCK_TOKENS + 2) + 64,
        max_requests=options.requests,
        batch_tokens=8192,
        prefix_caching=False,
        # Requests that end as soon as they begin: what they hold until it is copied is no measure
        # of a server.
        settings={"capacity": "16GiB", "chunk_size": 256, "max_held_blocks": options.requests * options.tokens},
    )
    server = world.Server(shape, options.folder)
    server.runner._forward = lambda rank, batch: []  # type: ignore[method-assign]
    return server


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the drive to be used; a folder that is not there yet")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} is there already: give a folder that is not, or remove it")
    options.folder.mkdir(parents=True)
    world.KV_HEADS, world.HEAD_SIZE, world.MAX_TOKENS, world.HANGS_S = KV_HEADS, HEAD_SIZE, options.tokens + 64, 600.0
    world.MODEL |= {"max_position_embeddings": options.tokens + 64, "num_hidden_layers": LAYERS}
    Rank.poison = lambda self, group, blocks: None  # type: ignore[method-assign]
    source = random.Random(options.seed)
    prompts = [[source.randrange(4, 500) for _ in range(options.tokens)] for _ in range(options.requests)]
    first = serve(options)
    for tensor in first.runner.ranks[0]._kv.values():
        tensor.copy_(torch.randint(0, 2**62, tensor.shape))
    for number, prompt in enumerate(prompts):
        first.ask(f"store{number}", prompt, max_tokens=1)
        first.drain()
    first.close()
    server = serve(options)
    file = peer.data(options.folder / "cache")
    point = peer.best(file)
    shares, rates = [], []
    for number in range(options.rounds):
        rate, before = peer.rate(file, point), server.loaded_tokens
        began = time.perf_counter()
        for i, prompt in enumerate(prompts):
            server.ask(f"load{number}.{i}", prompt, max_tokens=1)
        server.drain()
        took = time.perf_counter() - began
        loaded = server.loaded_tokens - before
        assert loaded >= 0.9 * options.tokens * options.requests, f"only {loaded} tokens were loaded"
        rates.append(loaded / took)
        shares.append(loaded * TOKEN_BYTES / took / rate)
    print(f"{options.requests} prompts of {options.tokens} tokens at once, {TOKEN_BYTES >> 10} KiB of KV per token, all stored")
    show("tokens loaded per second", rates)
    show("bytes loaded per second / fio's (target >= 0.80)", shares)
    server.close()


if __name__ == "__main__":
    main()
