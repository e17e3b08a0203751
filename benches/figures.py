#!/usr/bin/env python3
"""Lists the figures of the docs that are older than the last change of what they measure.

docs/figures.json says for each set of figures: the page, what was measured, the commit, the command, and the paths whose change makes them old.
Rows of docs/benchmarks.json and docs/eviction.json bring their own commits. Exit status: 0; with --check 1 where a page does not name the
commit of its figures, or a commit is not in the history.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def git(*args):
    """What git prints, or None where it fails."""
    done = subprocess.run(["git", "-C", ROOT, *args], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def sets():
    """All sets of figures, those of the JSON files by commit."""
    listed = json.loads((ROOT / "docs/figures.json").read_text())
    yield from listed["figures"]
    for name, fixed in listed["data"].items():
        kept = json.loads((ROOT / name).read_text())
        commits = {}
        for what, row in (kept["rows"] if "rows" in kept else kept).items():
            commits.setdefault(row["commit"], []).append(what)
        for commit, what in commits.items():
            yield {**fixed, "what": "; ".join(what), "commit": commit}


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--check", action="store_true", help="fail where a page does not name a figure's commit")
    args = p.parse_args()
    wrong, old = [], 0
    for figure in sets():
        name, commit = f"{figure['page']}: {figure['what']}", figure["commit"]
        if commit not in (ROOT / figure["page"]).read_text():
            wrong.append(f"{name}: the page does not name commit {commit}")
        # A shallow clone, or a folder without git, lacks the commit; that says nothing about the page.
        if git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}") is None:
            if git("rev-parse", "--is-shallow-repository") == "false":
                wrong.append(f"{name}: commit {commit} is not in the history")
            continue
        changes = git("log", "--format=%h", f"{commit}..HEAD", "--", *figure["paths"]).split()
        if changes:
            old += 1
            print(f"{name}\n  measured at {commit}; {len(changes)} changes of {', '.join(figure['paths'])} since, the last {changes[0]}\n  {figure['command']}")
    print(f"{old} sets of figures are older than what they measure", file=sys.stderr)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if args.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
