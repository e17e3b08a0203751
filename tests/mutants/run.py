#!/usr/bin/env python3
"""Runs scripted mutants: each changes one place of the sources, and the tests must notice.

usage: run.py LIST.json [--only NAME] [--update FILE.md]

A list names the commands that judge its mutants and, per mutant, file, old text (which must occur once), new text, and why it
matters:

    {"commands": {"fast": {"build": "...", "test": "..."}},
     "mutants": [{"name": ..., "file": ..., "old": ..., "new": ..., "why": ..., "by": "fast"}]}

Everything happens in a copy of the tree under target/mutants; its build is kept from run to run. `build` has to succeed, for a
mutant that does not compile has not been killed by a test; where it fails, the mutant is an error of the list. `test` has to
fail, within the time limit; a mutant that makes it hang is killed too, and listed as "killed (hangs)". First both have to succeed
without a mutant. With --update the table of results replaces the text between the two marks of the list's name in FILE.md.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
COPY = ROOT / "target" / "mutants" / "tree"
TIMEOUT_S = int(os.environ.get("FOREBAY_MUTANT_TIMEOUT_S", "600"))


def tree_files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def refresh() -> None:
    """Makes the copy equal to the tree, leaving alone what is the same, so that builds stay fresh."""
    names = tree_files()
    for name in names:
        source, target = ROOT / name, COPY / name
        content = source.read_bytes()
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(source.stat().st_mode)
    keep = set(names)
    for path in COPY.rglob("*"):
        name = path.relative_to(COPY)
        if path.is_file() and str(name) not in keep and name.parts[0] != "target":
            path.unlink()


def run(command: str) -> tuple[str, str]:
    """Runs a command in the copy: "passed", "failed" or "hangs", and the end of its output."""
    try:
        done = subprocess.run(
            ["timeout", str(TIMEOUT_S), "bash", "-c", command], cwd=COPY, capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        raise SystemExit(f"{command}: {error}") from error
    said = (done.stdout + done.stderr)[-2000:]
    if done.returncode == 124:
        return "hangs", said
    return ("passed" if done.returncode == 0 else "failed"), said


def judge(mutant: dict, commands: dict) -> tuple[str, float]:
    path = COPY / mutant["file"]
    original = path.read_text(encoding="utf-8")
    found = original.count(mutant["old"])
    if found != 1:
        return f"ERROR: the old text occurs {found} times in {mutant['file']}", 0.0
    command = commands[mutant["by"]]
    start = time.monotonic()
    try:
        path.write_text(original.replace(mutant["old"], mutant["new"]), encoding="utf-8")
        outcome, said = run(command["build"])
        if outcome != "passed":
            return f"ERROR: does not build:\n{said}", 0.0
        outcome, _ = run(command["test"])
    finally:
        path.write_text(original, encoding="utf-8")
    result = {"passed": "SURVIVED", "failed": "killed", "hangs": "killed (hangs)"}[outcome]
    return result, time.monotonic() - start


def update(document: pathlib.Path, name: str, mutants: list[dict], results: dict[str, str]) -> None:
    """Writes the table; mutants that did not run keep the result that the table has of them."""
    begin, end = f"<!-- mutants {name} -->", f"<!-- end of mutants {name} -->"
    text = document.read_text(encoding="utf-8")
    found = re.search(f"{re.escape(begin)}(.*?){re.escape(end)}", text, re.DOTALL)
    if found is None:
        raise SystemExit(f"{document} has no {begin}")
    before = {row[0]: row[-1] for row in re.findall(r"^\| ([\w-]+) \| (.*) \| ([^|]*) \|$", found[1], re.MULTILINE)}
    table = ["| mutant | file | what is wrong | result |", "| --- | --- | --- | --- |"]
    for m in mutants:
        result = results.get(m["name"]) or before.get(m["name"], "not run")
        table.append(f"| {m['name']} | `{m['file']}` | {m['why']} | {result.splitlines()[0]} |")
    document.write_text("\n".join([text[: found.start()] + begin, *table, end + text[found.end() :]]), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs scripted mutants.")
    parser.add_argument("list", type=pathlib.Path)
    parser.add_argument("--only", help="run the mutants whose name contains this")
    parser.add_argument("--update", type=pathlib.Path, help="write the table of results into this file")
    args = parser.parse_args()
    listed = json.loads(args.list.read_text(encoding="utf-8"))
    commands = listed["commands"]
    mutants = [m for m in listed["mutants"] if not args.only or args.only in m["name"]]
    if len({m["name"] for m in listed["mutants"]}) != len(listed["mutants"]):
        raise SystemExit("two mutants of the same name")
    refresh()
    for name in sorted({m["by"] for m in mutants}):
        for step in ("build", "test"):
            outcome, said = run(commands[name][step])
            if outcome != "passed":
                raise SystemExit(f"{name}: {step} {outcome} without a mutant:\n{said}")
    rows, bad = [], 0
    for mutant in mutants:
        result, seconds = judge(mutant, commands)
        bad += not result.startswith("killed")
        rows.append((mutant, result))
        print(f"{result:16} {seconds:6.1f} s  {mutant['name']}", flush=True)
    print(f"{len(rows) - bad} of {len(rows)} mutants killed")
    if args.update:
        update(args.update, args.list.stem, listed["mutants"], {m["name"]: result for m, result in rows})
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
