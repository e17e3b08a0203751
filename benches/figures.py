#!/usr/bin/env python3
"""Lists the figures of the docs that are older than the last change of what they measure.

docs/figures.json says for each set of figures: the page, what was measured, the commit, the command, and the paths whose change makes them old.
Rows of docs/benchmarks.json and docs/eviction.json bring their own commits. Comments, docstrings and tests change no figure. Exit status: 0;
with --check 1 where a page does not name the commit of its figures, or a commit is not in the history.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def git(*args):
    """What git prints, or None where it fails."""
    done = subprocess.run(["git", "-C", ROOT, *args], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def code(commit, name):
    """What the file does: its text without comments, docstrings, tests and layout; None where there is no such file."""
    text = git("show", f"{commit}:{name}")
    if text is None:
        return None
    if name.endswith(".py"):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node) is not None:
                del node.body[0]
        return ast.dump(tree)
    text = text.split("#[cfg(test)]\nmod tests {")[0]
    return "".join(re.sub(r"(^|\s)//.*", "", line) for line in text.splitlines()).replace(" ", "")


def changed(commit, paths):
    """The files of `paths` whose code is another than at `commit`; tests aside."""
    names = (git("diff", "--name-only", "--no-renames", commit, "HEAD", "--", *paths) or "").split()
    is_test = re.compile(r"(^|/)tests?/|(^|[/_])tests\.rs$")
    return [name for name in names if name.endswith((".rs", ".py")) and not is_test.search(name) and code(commit, name) != code("HEAD", name)]


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
        # A shallow clone, or a folder without git, lacks the commit; that says nothing about the
        # page.
        if git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}") is None:
            if git("rev-parse", "--is-shallow-repository") == "false":
                wrong.append(f"{name}: commit {commit} is not in the history")
            continue
        files = changed(commit, figure["paths"])
        if files:
            old += 1
            shown = ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
            print(f"{name}\n  measured at {commit}; changed since: {shown}\n  {figure['command']}")
    print(f"{old} sets of figures are older than what they measure", file=sys.stderr)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if args.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
