"""LMCache's own tests of its L2 adapters, over Forebay in the place of their mocks."""

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
#: A file of LMCache's, what stands for Forebay there, how many tests it has, and those that are
#: left out.
SUITES = [
    ("test_native_connector_l2_adapter.py", "MockNativeConnector", 92, ()),
    # The mock waits as long as a slow network would, and declares its capacity to LMCache, which
    # then evicts: Forebay does neither.
    ("test_mock_l2_adapter.py", "MockL2Adapter", 40, ("delayed_by_bandwidth", "get_usage")),
]


@pytest.mark.ci
@pytest.mark.parametrize(("file", "mock", "count", "left_out"), SUITES)
def test_lmcaches_own_suite_passes(tmp_path: Path, file: str, mock: str, count: int, left_out: tuple[str, ...]) -> None:
    prepare = [sys.executable, HERE / "prepare.py", "--suite", "--lmcache", lmcache.__version__]
    found = subprocess.run(prepare, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    source = Path(found.stdout.strip(), file).read_text()
    # Behind the mock itself, or behind the import of it.
    behind = max(node.end_lineno or 0 for node in ast.parse(source).body if mock in (getattr(node, "name", ""), *names(node)))
    lines = source.splitlines(keepends=True)
    lines.insert(behind, f"\n\nfrom retarget import {mock}\n")
    (tmp_path / "test_retargeted.py").write_text("".join(lines))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    command += ["-k", " and ".join(f"not {part}" for part in left_out)] if left_out else []
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(HERE)}, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-8000:]
    assert re.search(rf"\b{count} passed\b", done.stdout) and "skipped" not in done.stdout.splitlines()[-1], done.stdout[-500:]


def names(node: ast.stmt) -> list[str]:
    """What an import brings."""
    return [name.name for name in node.names] if isinstance(node, ast.ImportFrom) else []
