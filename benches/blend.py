"""Time to the first token of a prompt whose segments are blended, in real vLLM on a CPU, beside
that of a computed one.

Model `speed` of tests/vllm/model.py in bfloat16; prompts of a preamble, 16 segments of 240 tokens
in an order of their own, and a question: 4096 tokens. Each round asks for one order once computed
and once per share of tokens recomputed; every order is new, so that no prefix of it is cached.
Then each arm once more while other requests generate: the longest that these wait for a token.
Weights are random: what blending costs in quality is measured by tests/vllm/blend_quality.py, with
a trained model.

Usage, by the Python of tests/vllm/environment.py: blend.py [--rounds N] [--folder DIRECTORY]
[--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parent.parent / "tests" / "vllm" / "model.py"
PREAMBLE, QUESTION, SEGMENTS, SEGMENT = 128, 128, 16, 240
#: Selector and ratio of each arm; `None` is computed.
ARMS: dict[str, tuple[str, float] | None] = {"computed": None, "none": ("none", 0.0), "query 15 %": ("query", 0.15), "first-k 15 %": ("first-k", 0.15)}


def first_token(llm: Any, prompt: list[int], asking: dict[str, Any] | None, name: str) -> float:
    """Seconds from the request to its first token."""
    from vllm import SamplingParams

    extra = {} if asking is None else {"extra_args": {"kv_transfer_params": asking}}
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True, **extra)
    engine = llm.llm_engine
    began = time.perf_counter()
    engine.add_request(name, {"prompt_token_ids": prompt, "cache_salt": name}, sampling)
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - began


def longest_wait(llm: Any, others: list[list[int]], prompt: list[int], asking: dict[str, Any], name: str) -> float:
    """The longest that requests which generate wait for a token while this prompt is prefilled or blended."""
    from vllm import SamplingParams

    engine, tokens = llm.llm_engine, 400
    sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
    for number, other in enumerate(others):
        engine.add_request(f"{name} {number}", {"prompt_token_ids": other, "cache_salt": f"{name} {number}"}, sampling)
    while sum(bool(made.outputs[0].token_ids) for made in engine.step()) < len(others):
        pass
    extra = {"extra_args": {"kv_transfer_params": asking}}
    engine.add_request(name, {"prompt_token_ids": prompt, "cache_salt": name}, SamplingParams(temperature=0, max_tokens=1, **extra))
    longest, last, is_over = 0.0, time.perf_counter(), False
    while not is_over:
        answers = [made.request_id for made in engine.step()]
        is_over = name in answers
        if len(answers) - is_over == len(others):
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
    engine.abort_request([f"{name} {number}" for number in range(len(others))])
    while engine.has_unfinished_requests():
        engine.step()
    return longest


def counted(llm: Any, name: str) -> int:
    """A counter of the connector."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == f"vllm:forebay_{name}")


def measure(model: str, folder: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each arm, round by round: to the first token, and how long others waited."""
    from vllm import LLM

    cache = {"cache_dir": str(folder / "cache"), "capacity": "4GiB", "min_free": 0, "enable_blending": True}
    transfer = {"kv_connector": "ForebayConnector", "kv_role": "kv_both", "kv_connector_extra_config": cache}
    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=8192,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        block_size=32,
        enforce_eager=True,
        seed=0,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        worker_extension_cls="forebay.vllm.blend.worker.BlendWorker",
        kv_transfer_config=transfer,
    )
    source = random.Random(11)
    preamble, *segments = [[source.randrange(4, 512) for _ in range(count)] for count in (PREAMBLE, *(SEGMENT,) * SEGMENTS)]
    places = [(PREAMBLE + SEGMENT * number, PREAMBLE + SEGMENT * (number + 1)) for number in range(SEGMENTS)]
    others = [[source.randrange(4, 512) for _ in range(64)] for _ in range(4)]
    times: dict[str, dict[str, list[float]]] = {arm: {"first token": [], "others wait": []} for arm in ARMS}

    def ask(number: int) -> None:
        order = source.sample(segments, SEGMENTS)
        prompt = preamble + [token for segment in order for token in segment] + [source.randrange(4, 512) for _ in range(QUESTION)]
        for arm, how in ARMS.items():
            # Of computed ones nothing is to be loaded or stored while others run.
            asking: dict[str, Any] = {"forebay.skip_save": True}
            if how is not None:
                asking |= {"forebay.segments": places, "forebay.blend_select": how[0], "forebay.blend_ratio": how[1]}
            if number == 0:
                asking["forebay.store_segments"] = True
            times[arm]["first token"].append(first_token(llm, prompt, asking, f"{number} {arm}"))
            # Blended KV is found in vLLM's prefix cache.
            assert llm.reset_prefix_cache()
            times[arm]["others wait"].append(longest_wait(llm, others, prompt, asking, f"{number} {arm} again"))
            assert llm.reset_prefix_cache()

    for number in range(rounds + 1):
        ask(number)
    blended = counted(llm, "blend_segments_reused")
    assert blended == 2 * (rounds + 1) * (len(ARMS) - 1) * SEGMENTS, f"{blended} segments were reused"
    # The first round stores the segments, and warms.
    return {arm: {what: seconds[1:] for what, seconds in of.items()} for arm, of in times.items()}


def main() -> None:
    """Runs it and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the cache lies; a temporary folder without it")
    parser.add_argument("--json", type=Path, help="where the seconds are written")
    options = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "4", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))}
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        model = Path(made, "model")
        subprocess.run([sys.executable, MODELS, model, "bfloat16", "speed"], check=True)
        times = measure(str(model), Path(made), options.rounds)
    if options.json is not None:
        options.json.write_text(json.dumps(times))
    for what in ("first token", "others wait"):
        base = statistics.median(times["computed"][what])
        print(f"| recomputed | {what}, median | smallest to largest | of computed |\n|---|---|---|---|")
        for arm, of in times.items():
            middle = statistics.median(of[what])
            print(f"| {arm} | {middle:.3f} s | {min(of[what]):.3f} to {max(of[what]):.3f} s | {middle / base:.2f} |")
        print()


if __name__ == "__main__":
    main()
