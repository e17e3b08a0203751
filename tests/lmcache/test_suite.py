"""LMCache's own tests of its native connector, all of them, over Forebay in the place of their mock."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import lmcache
import pytest

HERE = Path(__file__).resolve().parent
#: Tests in the suite of the pinned version.
TESTS = 92


@pytest.mark.ci
def test_lmcaches_own_suite_passes(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, HERE / "prepare.py", "--suite", "--lmcache", lmcache.__version__], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    source = Path(found.stdout.strip(), "test_native_connector_l2_adapter.py").read_text()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "MockNativeConnector"]
    lines = source.splitlines(keepends=True)
    lines.insert(classes[0].end_lineno, "\n\nfrom retarget import MockNativeConnector\n")
    (tmp_path / "test_retargeted.py").write_text("".join(lines))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(HERE)}, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-8000:]
    assert re.search(rf"\b{TESTS} passed\b", done.stdout) and "skipped" not in done.stdout.splitlines()[-1], done.stdout[-500:]
