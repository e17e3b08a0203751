"""Layer-wise loading beside whole-request loading: times to the first token in real vLLM on this machine's CPU.

    PYTHONPATH=tests/vllm python benches/overlap.py --folder DIR [--rounds 5] [--prefix 4096]

needs vLLM and the release wheel (`make wheel`) in this Python; `make overlap` has both. A prompt is a prefix that is stored and a suffix that
is new and computed. Three vLLMs are up at once, and each request goes to one while the others rest, in an order that changes with every round:

- whole: the prefix is loaded between steps, then the suffix is computed (`use_layerwise: false`);
- layers: the first step waits for one layer at a time (`use_layerwise: true`, and nothing makes it load between steps);
- auto: `use_layerwise: auto` with its defaults.

What the suffix takes to compute is measured in the first vLLM, with the prefix in vLLM's own cache. What the prefix takes to load is `whole`
less that. The aim is (max(load, compute) + min(load, compute) / layers) x 1.1. Medians are printed as a table, first with the KV on the drive,
then in the memory tier.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from conftest import HERE, environment

SUFFIXES = (128, 256, 512, 1024, 2048)
MODES: dict[str, dict[str, Any]] = {
    "whole": {"use_layerwise": False},
    "layers": {"use_layerwise": True, "max_sync_stall_ms": 60_000},
    "auto": {"use_layerwise": "auto"},
}
LONGEST_LOAD_MS = 60_000
#: Of the model `speed`.
LAYERS = 8
SLACK = 1.1


class Child:
    """A vLLM in a process of its own, asked line by line."""

    def __init__(self, folder: Path, name: str, model: Path, cache: dict[str, Any], role: str, longest: int) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        engine = {"max_model_len": longest, "max_num_batched_tokens": longest, "async_scheduling": True}
        spec = {"model": str(model), "rounds": [], "cache": cache, "role": role, "engine": engine}
        command = [sys.executable, __file__, "--serve", json.dumps(spec)]
        # What is printed by libraries must not be taken for an answer.
        self.process = subprocess.Popen(
            command, env=environment(folder), cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True
        )

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise SystemExit(f"{self.name} has ended:\n{self.log.read_text()[-4000:]}")

    def first_token(self, prompt: list[int], cached: int, reset: bool = True) -> float:
        """Seconds to the first token; `cached` tokens of the prompt must not have been computed."""
        answer = self.ask(prompt=prompt, reset=reset)
        if answer["cached"] != cached:
            raise SystemExit(f"{self.name}: {answer['cached']} tokens were not computed, where {cached} were meant")
        return answer["seconds"]

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def serve(spec: dict[str, Any]) -> None:
    """Answers the requests on standard input."""
    import offline
    from vllm import LLM, SamplingParams

    llm = LLM(**offline.arguments(offline.Spec(**spec)))
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("settle"):
            offline.settle(llm)
            print("answer {}", flush=True)
            continue
        if request["reset"]:
            # Blocks of the request before are held until they have been stored.
            if not llm.reset_prefix_cache():
                offline.settle(llm)
                assert llm.reset_prefix_cache()
        began = time.perf_counter()
        (made,) = llm.generate([{"prompt_token_ids": request["prompt"]}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        print("answer " + json.dumps({"seconds": seconds, "cached": made.num_cached_tokens}), flush=True)


def measure(given: argparse.Namespace, folder: Path, model: Path) -> None:
    source = random.Random(given.seed)
    longest = given.prefix + max(SUFFIXES) + 64

    def tokens(count: int) -> list[int]:
        return [source.randrange(4, 512) for _ in range(count)]

    prefixes = [tokens(given.prefix) for _ in range(given.rounds)]
    cache = {"cache_dir": str(folder / "cache"), "capacity": "8GiB", "min_free": 0, "load_timeout_ms": LONGEST_LOAD_MS}
    filling = Child(folder, "filling", model, cache, "kv_both", longest)
    for prefix in prefixes:
        filling.ask(prompt=[*prefix, *tokens(8)], reset=True)
    filling.ask(settle=True)
    filling.stop()
    for where, tier in (("drive", {}), ("memory", {"local_cpu": True, "max_local_cpu_size": 2})):
        # They store nothing: only loads are measured.
        children = {name: Child(folder, f"{where}-{name}", model, cache | mode | tier, "kv_consumer", longest) for name, mode in MODES.items()}
        for child in children.values():
            for prefix in prefixes:
                # Into memory, where there is a tier; and what first requests cost anyway.
                child.first_token([*prefix, *tokens(max(SUFFIXES))], given.prefix)
        print(f"\n{where}, {given.prefix} tokens loaded, medians of {given.rounds} rounds, seconds\n")
        print("| suffix | compute | load | whole | layers | auto | layers / whole | layers / aim | auto / aim |\n|" + "---|" * 9)
        for suffix in SUFFIXES:
            seen: dict[str, list[float]] = {name: [] for name in (*MODES, "compute")}
            for turn, prefix in enumerate(prefixes):
                for name in list(MODES)[turn % len(MODES) :] + list(MODES)[: turn % len(MODES)]:
                    seen[name].append(children[name].first_token([*prefix, *tokens(suffix)], given.prefix))
                    if name == "whole":
                        seen["compute"].append(children[name].first_token([*prefix, *tokens(suffix)], given.prefix, reset=False))
            print(row(suffix, seen), flush=True)
        for child in children.values():
            child.stop()


def row(suffix: int, seen: dict[str, list[float]]) -> str:
    """A line of the table; ratios are medians of the rounds' own."""
    loads = [whole - compute for whole, compute in zip(seen["whole"], seen["compute"], strict=True)]
    aims = [(max(load, compute) + min(load, compute) / LAYERS) * SLACK for load, compute in zip(loads, seen["compute"], strict=True)]

    def ratio(name: str, to: list[float]) -> str:
        return f"{statistics.median(one / other for one, other in zip(seen[name], to, strict=True)):.2f}"

    times = [seen["compute"], loads, *(seen[name] for name in MODES)]
    cells = [str(suffix), *(f"{statistics.median(one):.3f}" for one in times)]
    return "| " + " | ".join([*cells, ratio("layers", seen["whole"]), ratio("layers", aims), ratio("auto", aims)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="on the drive that is meant")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefix", type=int, default=4096, help="tokens, a multiple of 256")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(json.loads(given.serve))
    if given.folder is None or given.prefix % 256:
        parser.error("--folder is needed, and a prefix of a multiple of 256 tokens")
    with tempfile.TemporaryDirectory(dir=given.folder.resolve()) as made:
        folder = Path(made)
        subprocess.run([sys.executable, HERE / "model.py", folder / "model", "float32", "speed"], check=True, env=environment(folder))
        measure(given, folder, folder / "model")


if __name__ == "__main__":
    main()
