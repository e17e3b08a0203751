"""The demonstration behind `make vllm-demo`: a long document and a question, a restart of the server, and the same question again.

Starts vLLM's OpenAI server with Forebay on SmolLM2-135M-Instruct (smollm.py), asks a question about document.md, stops the server, starts
another on the same cache directory and asks again. Prints the answer, the time to the first token of both, and where their tokens came
from, as vLLM counts them. Fails where the second answer differs, nothing was loaded, or the answer is wrong.

Usage: demo.py [--model DIR] [--document FILE] [--question TEXT] [--folder DIR]; --folder is on the drive to show, and is left as it was found.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import smollm
from test_server import Server, server

HERE = Path(__file__).resolve().parent
#: Tokens of an answer at most.
ANSWER_TOKENS = 60
#: Asked about document.md, and what an answer in other words has too.
QUESTION, TRUTH = "Who is the keeper of the station? Answer in one sentence.", "Marta Lindqvist"
#: Tokens of the longest prompt and its answer. SmolLM2 knows so many positions.
LONGEST = 8192
HITS = "vllm:external_prefix_cache_hits"
COUNTED = "vllm:prompt_tokens"


@dataclass
class Shown:
    """What one server did."""

    first_token_s: float
    answer: str
    prompt_tokens: float
    from_disk: float


def ask(to: Server, text: str) -> tuple[float, str]:
    """Seconds to the first token, and the whole answer."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        to.base + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, first, said = time.perf_counter(), 0.0, ""
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                # The first message only says who speaks.
                part = json.loads(data)["choices"][0]["delta"].get("content") or ""
                first = first or (time.perf_counter() - began if part else 0.0)
                said += part
    return first, said.strip()


def serve(folder: Path, model: str, prompt: str) -> Shown:
    """One life of a server."""
    cache = {"cache_dir": str(folder / "cache"), "capacity": "2GiB"}
    longest = ("--max-model-len", str(LONGEST), "--max-num-batched-tokens", str(LONGEST))
    with server(folder, model, cache, longest) as running:
        # What a first request costs anyway, whatever its prompt.
        ask(running, "Good morning.")
        before, counted = running.metric(HITS), running.metric(COUNTED)
        first, answer = ask(running, prompt)
        return Shown(first, answer, running.metric(COUNTED) - counted, running.metric(HITS) - before)


def main() -> int:
    """Runs it; 0 where the second server loaded the prompt and answered the same, and rightly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="another model, a folder on this machine")
    parser.add_argument("--document", type=Path, default=HERE / "document.md", help="what the question is about")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--folder", type=Path, default=Path("target/vllm-demo"), help="where the cache goes")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    model = str((asked.model or smollm.made()).resolve())
    document = asked.document.read_text()
    prompt = f"{document}\n\n{asked.question}"
    with tempfile.TemporaryDirectory(dir=asked.folder) as work:
        folder = Path(work).resolve()
        print(f"document: {asked.document.name}, {len(document.split())} words; starting vLLM with an empty cache …", flush=True)
        cold = serve(folder, model, prompt)
        print(f"question: {asked.question}\nanswer:   {cold.answer}")
        print("stopped; starting vLLM again on the same cache …", flush=True)
        warm = serve(folder, model, prompt)
        print(f"answer:   {warm.answer}")
    print(f"\n{'':14}{'first token':>14}{'computed':>12}{'from disk':>12}")
    for name, shown in (("cold", cold), ("after restart", warm)):
        computed = shown.prompt_tokens - shown.from_disk
        print(f"{name:14}{shown.first_token_s:>12.3f} s{computed:>12.0f}{shown.from_disk:>12.0f}")
    print(f"\nthe first token came {cold.first_token_s / warm.first_token_s:.1f} times sooner after the restart")
    same = warm.answer == cold.answer
    print("both answers are the same" if same else "THE ANSWERS DIFFER")
    ours = asked.model is None and asked.document == HERE / "document.md" and asked.question == QUESTION
    right = TRUTH in warm.answer or not ours
    if not right:
        print(f"THE ANSWER IS WRONG: {TRUTH!r} is not in it")
    return 0 if same and right and warm.from_disk > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
