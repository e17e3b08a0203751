"""The demonstration behind `make vllm-demo`: a long prompt, a restart of the server, and the same prompt again.

Starts vLLM's OpenAI server with Forebay on a small model with random weights, asks for a few tokens after a long prompt, stops the
server, starts another on the same cache directory and asks again. Prints the time to the first token of both, and where
their tokens came from, as vLLM counts them. Fails where the second answer differs or nothing was loaded.

Usage: demo.py [--tokens N] [--folder DIR]; --folder is on the drive to show, and is left as it was found but for the model.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from conftest import SEED, environment
from test_server import Server, server

HERE = Path(__file__).resolve().parent
#: Tokens that are asked for after the prompt.
ANSWER_TOKENS = 8
HITS = "vllm:external_prefix_cache_hits"
ASKED = "vllm:external_prefix_cache_queries"


@dataclass
class Shown:
    """What one server did."""

    first_token_s: float
    text: str
    prompt_tokens: int
    from_disk: float


def ask(to: Server, prompt: list[int]) -> tuple[float, str]:
    """Seconds to the first token, and the whole answer."""
    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        to.base + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, first, text = time.perf_counter(), 0.0, ""
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                first = first or time.perf_counter() - began
                text += json.loads(data)["choices"][0]["text"]
    return first, text


def serve(folder: Path, model: str, prompt: list[int]) -> Shown:
    """One life of a server."""
    cache = {"cache_dir": str(folder / "cache"), "capacity": "2GiB"}
    longest = ("--max-model-len", str(len(prompt) + 64), "--max-num-batched-tokens", str(len(prompt) + 64))
    with server(folder, model, cache, longest) as running:
        # What a first request costs anyway, whatever its prompt.
        ask(running, prompt[:16][::-1])
        before = running.metric(HITS)
        first, text = ask(running, prompt)
        return Shown(first, text, len(prompt), running.metric(HITS) - before)


def main() -> int:
    """Runs it; 0 where the second server loaded the prompt and answered the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt")
    parser.add_argument("--folder", type=Path, default=Path("target/vllm-demo"), help="where model and cache go")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    model = asked.folder / "model"
    if not (model / "config.json").exists():
        command = [sys.executable, HERE / "model.py", model, "float32", "demo"]
        subprocess.run(command, check=True, env=environment(asked.folder.resolve()))
    source = random.Random(SEED)
    prompt = [source.randrange(4, 512) for _ in range(asked.tokens)]
    with tempfile.TemporaryDirectory(dir=asked.folder) as work:
        folder = Path(work).resolve()
        print(f"a prompt of {len(prompt)} tokens; starting vLLM with an empty cache …", flush=True)
        cold = serve(folder, str(model.resolve()), prompt)
        print("stopped; starting vLLM again on the same cache …", flush=True)
        warm = serve(folder, str(model.resolve()), prompt)
    print(f"\n{'':14}{'first token':>14}{'computed':>12}{'from disk':>12}")
    for name, shown in (("cold", cold), ("after restart", warm)):
        computed = shown.prompt_tokens - shown.from_disk
        print(f"{name:14}{shown.first_token_s:>12.3f} s{computed:>12.0f}{shown.from_disk:>12.0f}")
    print(f"\ntime to first token after the restart: {warm.first_token_s / cold.first_token_s:.3f} of the cold one")
    same = warm.text == cold.text
    print("both answers are the same" if same else f"THE ANSWERS DIFFER: {cold.text!r} and {warm.text!r}")
    return 0 if same and warm.from_disk > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
