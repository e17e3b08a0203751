#!/usr/bin/env python3
"""Draws docs/charts/*.svg from the committed figures (docs/benchmarks.json, docs/eviction.json). Needs matplotlib: `make charts` fetches it."""

import json
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
# The same figures give the same file.
matplotlib.rcParams.update({"svg.hashsalt": "forebay", "svg.fonttype": "none", "font.family": "sans-serif", "axes.spines.top": False,
                            "axes.spines.right": False})
import matplotlib.pyplot as plt  # noqa: E402  (after the back end is chosen)

DOCS = Path(__file__).resolve().parent.parent / "docs"
#: Rows of benchmarks.json that are ratios to fio, and their names on the chart.
SPEED = {
    "load, verified and scattered, llama-3.1-8b": "load, llama-3.1-8b",
    "load, verified and scattered, llama-3.1-8b, four at once": "load, llama-3.1-8b, four at once",
    "load with codec exp4 beside fio": "load, llama-3.1-8b, codec, bytes of KV",
    "load, verified and scattered, deepseek-v3": "load, deepseek-v3 (MLA)",
    "store, gathered, journalled and flushed, llama-3.1-8b": "store, llama-3.1-8b",
    "store with codec exp4 beside fio": "store, llama-3.1-8b, codec, bytes of KV",
    "reads beside a writer at 20 %": "reads beside a writer",
}
OURS, PEER = "#1f6f8b", "#c9d6df"


def speed():
    """Each ratio to fio as a bar, with a line from the least to the greatest of its pairs."""
    rows = json.loads((DOCS / "benchmarks.json").read_text())["rows"]
    figure, axes = plt.subplots(figsize=(8, 4))
    for place, (row, name) in enumerate(reversed(SPEED.items())):
        ratio, least, most = map(float, re.match(r"([\d.]+) \(min ([\d.]+), max ([\d.]+)", rows[row]["figure"]).groups())
        axes.barh(place, ratio, color=OURS, height=0.55)
        axes.plot([least, most], [place, place], color="#333333", linewidth=1)
        axes.text(0.02, place, f"{name}: {ratio:.2f} × fio", va="center", color="white", fontsize=10)
    axes.axvline(1.0, color="#333333", linestyle="--", linewidth=1)
    axes.set_yticks([])
    axes.set_xlim(0, 1.45)
    commits = sorted({rows[row]["commit"] for row in SPEED})
    axes.set_xlabel(f"bytes per second, fio at its best = 1; line: least and most of the pairs; commit {', '.join(commits)}", fontsize=9)
    save(figure, "speed")


def eviction():
    """Hit ratio over the capacity, a line for each policy."""
    simulated = json.loads((DOCS / "eviction.json").read_text())["simulated"]
    figure, axes = plt.subplots(figsize=(8, 4))
    capacities = [3, 5, 10, 20]
    shades = {"prefix": (OURS, 2.5), "optimum": ("#333333", 1.5)}
    for policy, hits in simulated["rows"]["policies"].items():
        colour, width = shades.get(policy, (None, 1))
        axes.plot(capacities, hits, label=policy, color=colour, linewidth=width, marker="o", markersize=3)
    axes.set_xscale("log")
    axes.set_xticks(capacities, [f"{capacity} M" for capacity in capacities])
    axes.minorticks_off()
    axes.set_ylim(0)
    axes.set_xlabel(f"capacity in tokens; Mooncake's conversation trace, simulated; commit {simulated['commit']}", fontsize=9)
    axes.set_ylabel("hit ratio in tokens")
    axes.legend(fontsize=8, ncols=2, loc="lower right", frameon=False)
    save(figure, "eviction")


def save(figure, name):
    """Writes one chart; the date would change it at each run."""
    path = DOCS / "charts" / f"{name}.svg"
    path.parent.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    print(path.relative_to(DOCS.parent), file=sys.stderr)


if __name__ == "__main__":
    speed()
    eviction()
