"""What blending costs in quality, with real vLLM and SmolLM2-135M-Instruct: writes the tables of docs/blend.md.

Each text is four segments of 160 tokens between a system prompt of 24 and 96 tokens that follow. The segments are stored apart, behind the system
prompt, and blended. The distributions of the 96 tokens are compared with those of a full prefill: the mean Kullback-Leibler divergence, and how often
the likeliest token is the same. Texts are windows of this repository's own pages. The other table is blend_recall.py's. Usage: blend_quality.py
[--only quality|recall] [--texts N] [--prompts N] [--write | --select NAMES]; by the Python of environment.py, with forebay installed. Everything is computed in
float32.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE, FIGURES = ROOT / "docs/blend.md", ROOT / "docs/figures.json"
SYSTEM = "You are given a document. Read all of it with care, then continue it in the same style.\n\n"
SEGMENTS, SEGMENT, TAIL, SYSTEM_TOKENS = 4, 160, 96, 24
SEED, RESAMPLES = 5, 2000
#: How figures.json names what measures each table.
COMMANDS = {"quality": '"make blend-quality ONLY=quality"', "recall": '"make blend-quality ONLY=recall"'}
#: What is blended: selector, and ratio or threshold.
ARMS = [("none", 0.0)] + [(select, ratio) for select in ("query", "deviation", "first-k", "random") for ratio in (0.05, 0.15, 0.3)]
#: `deviation` with several check layers: the layers, their shares, and the mean of these.
LAYERS, SHARES, MEAN = [1, 10, 20], [0.2, 0.15, 0.1], 0.15
ARMS += [("layers", MEAN)]
#: `deviation` by thresholds alone.
ARMS += [("threshold", threshold) for threshold in (0.03, 0.06)]
ARMS += [("first-k", 1.0)]
#: What is also blended of segments that were stored without an anchor.
BARE = [("none", 0.0), ("query", 0.15), ("deviation", 0.15), ("random", 0.15)]
#: What their names end with.
WITHOUT = "without an anchor"


def windows(tokenizer: Any, count: int) -> list[list[int]]:
    """`count` texts, evenly spaced over the text of all pages, which has no tables and no code."""
    pages = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    text = "\n".join(page.read_text() for page in [*pages, *sorted((ROOT / "docs").glob("*.md"))] if page != PAGE)
    text = re.sub(r"^\|.*\n|^!\[.*\n|^<!--.*\n", "", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    tokens, length = tokenizer.encode(text, add_special_tokens=False), SEGMENTS * SEGMENT + TAIL
    if len(tokens) < count * length:
        sys.exit(f"the pages have {len(tokens)} tokens, too few for {count} texts of {length}")
    return [tokens[at : at + length] for at in (number * (len(tokens) - length) // max(count - 1, 1) for number in range(count))]


def compared(full: Any, other: Any) -> tuple[float, float]:
    """Divergence and agreement of two tables of logits."""
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean()), float((p.argmax(-1) == q.argmax(-1)).double().mean())


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and the bounds of its 95 % bootstrap interval, over texts."""
    source = random.Random(SEED)
    means = sorted(sum(source.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLES))
    return sum(values) / len(values), means[RESAMPLES // 40], means[-RESAMPLES // 40 - 1]


def started(folder: Path) -> Any:
    """vLLM with the model and a cache in `folder`."""
    import smollm
    from conftest import settings
    from vllm import LLM

    transfer = {"kv_connector": "ForebayConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings(folder / "cache")}
    return LLM(
        str(smollm.made()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        seed=0,
        worker_extension_cls="forebay.vllm.blend.worker.BlendWorker",
        kv_transfer_config=transfer,
    )


def measured(llm: Any, count: int) -> dict[str, list[tuple[float, float, float]]]:
    """Divergence, agreement and share of tokens recomputed of every text, by arm."""
    from forebay.vllm.blend import Blend
    from forebay.vllm.blend.blender import Asked

    tokenizer = llm.get_tokenizer()
    system = tokenizer.encode(SYSTEM, add_special_tokens=False)[:SYSTEM_TOKENS]
    places = [(len(system) + SEGMENT * n, len(system) + SEGMENT * (n + 1)) for n in range(SEGMENTS)]
    last, texts = places[-1][1], [system + window for window in windows(tokenizer, count)]
    source, found, whole = random.Random(SEED), {}, []

    def logits(blender: Any, rows: range) -> Any:
        return blender.logits(blender.forward(list(rows))[-TAIL:])

    for anchored in (True, False):
        anchor = system if anchored else []
        blend = Blend(llm, anchor)
        (blender,) = llm.collective_rpc(lambda worker: worker.forebay_blender)
        for number, tokens in enumerate(texts):
            began = time.monotonic()
            for start, end in places:
                blend.store(tokens[start:end])
            if anchored:
                blender.mix(Asked(tokens, [], "none", [0.0]))
                whole.append(logits(blender, range(len(tokens))))
            for select, ratio in ARMS if anchored else BARE:
                rows = sorted(source.sample(range(places[0][0], last), round(ratio * (last - places[0][0]))))
                by = {
                    "random": (rows, [ratio], [1], anchor, []),
                    "layers": ("deviation", SHARES, LAYERS, anchor, []),
                    "threshold": ("deviation", [1.0], [1], anchor, [ratio]),
                }.get(select, (select, [ratio], [1], anchor, []))
                asked = Asked(tokens, places, *by)
                mixed = blender.mix(asked)
                assert mixed.states == ["reused"] * SEGMENTS, mixed.states
                share = len(blender.blend(asked, mixed, last)) / (last - places[0][0])
                name = f"{select} {ratio:.0%}" if anchored else f"{select} {ratio:.0%} {WITHOUT}"
                found.setdefault(name, []).append((*compared(whole[number], logits(blender, range(last, len(tokens)))), share))
            print(f"text {number + 1} of {count}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return found


NAMES = {
    "query": "`query`: what the tokens after the segments attend to most",
    "deviation": "`deviation`: what differs most in layer 1",
    "layers": f"`deviation` in layers {LAYERS[0]}, {LAYERS[1]} and {LAYERS[2]}: {SHARES[0]:.0%}, {SHARES[1]:.0%} and {SHARES[2]:.0%}",
    "threshold": "`deviation`: what differs in layer 1 by so much of its size",
    "first-k": "`first-k`: the beginning of each segment",
    "random": "random tokens, for comparison",
    "none": "`none`",
}


def table(found: dict[str, list[tuple[float, float, float]]]) -> list[str]:
    """The rows of the page."""
    lines = ["| recomputed | share | KL to a full prefill (95 % interval) | same likeliest token |", "|---|---|---|---|"]
    order = [f"{select} {ratio:.0%} {WITHOUT}" for select, ratio in BARE] + [f"{select} {ratio:.0%}" for select, ratio in ARMS]
    for name in order:
        kls, sames, shares = zip(*found[name], strict=True)
        mean, low, high = interval([*kls])
        same, same_low, same_high = interval([*sames])
        select, given, *more = name.split(" ", 2)
        what = f"{NAMES[select].split(':')[0]}, stored {WITHOUT}" if more else "all" if given == "100%" else NAMES[select]
        what = what.replace("so much of its size", f"{given[:-1]} % of its size")
        lines.append(
            f"| {what} | {100 * sum(shares) / len(shares):.0f} % | {mean:.4f} ({low:.4f} to {high:.4f}) | {100 * same:.1f} % ({100 * same_low:.1f} to {100 * same_high:.1f}) |"
        )
    return lines


def write(name: str, said: str, lines: list[str]) -> None:
    """Puts a table into the page between its marks, and its commit into the list of figures."""
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short=7", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    begin, end = f"<!-- blend_{name}.py begins -->", f"<!-- blend_{name}.py ends -->"
    before, _, rest = PAGE.read_text().partition(begin)
    said = f"{said}, measured at {commit}, {time.strftime('%Y-%m-%d')}:"
    PAGE.write_text("\n".join([before + begin, said, "", *lines, end + rest.split(end)[1]]))
    listed = [
        re.sub(r'"commit": "\w+"', f'"commit": "{commit}"', line) if COMMANDS[name] in line else line
        for line in FIGURES.read_text().splitlines()
    ]
    FIGURES.write_text("\n".join(listed) + "\n")


def main() -> None:
    """Measures, prints, and with --write writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*COMMANDS], help="one of the tables [default: both]")
    parser.add_argument("--texts", type=int, default=20, help="of the table of quality")
    parser.add_argument("--prompts", type=int, default=60, help="of the table of recall")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/blend.md")
    parser.add_argument("--select", help="quality of these alone, printed only: " + ",".join(NAMES))
    asked = parser.parse_args()
    if asked.select is not None:
        if unknown := sorted({*asked.select.split(",")} - {*NAMES}):
            parser.error(f"--select {unknown[0]}: give some of {','.join(NAMES)}")
        asked.only, asked.write, BARE[:] = "quality", False, []
        ARMS[:] = [(select, ratio) for select, ratio in ARMS if select in asked.select.split(",")]
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import blend_recall
    from conftest import environment

    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(environment(Path(os.environ.get("HOME", folder))))
        llm = started(Path(folder))
        if asked.only != "recall":
            lines = table(measured(llm, asked.texts))
            print("\n".join(lines))
            if asked.write:
                write("quality", f"{asked.texts} texts", lines)
        if asked.only != "quality":
            lines = blend_recall.table(blend_recall.measured(llm, asked.prompts))
            print("\n".join(lines))
            if asked.write:
                write("recall", f"{asked.prompts} prompts", lines)


if __name__ == "__main__":
    main()
