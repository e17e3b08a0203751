"""`forebay warm prompts` with real vLLM: what it has warmed is loaded by other processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import LOADED, PATIENCE_S, environment, prompts
from test_server import server

#: Tokens of a chunk where nobody says otherwise, and options of a server whose KV the tests' other
#: processes find.
CHUNK = 256
SERVER = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8", "--max-model-len", "2048")
#: One token per byte (model.py).
TEXT = "Forebay keeps the KV of prompts. " * 12
MESSAGES = [{"role": "system", "content": "Answer. " * 40}, {"role": "user", "content": "What is KV? " * 8}]


def warm(folder: Path, lines: list[dict[str, Any]], *options: str) -> dict[str, Any]:
    """Runs the program and gives its report."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "forebay", "--json", "warm", "prompts", str(folder / "prompts.jsonl"), *options]
    done = subprocess.run(
        command, env=environment(folder, separate=True), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout)
    print(report)
    return report


@pytest.mark.ci
def test_a_launched_and_a_running_server_warm_for_others(model: str, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    ids, later = prompts(1)[0], prompts(1, seed=99)[0]
    lines = [{"prompt_token_ids": ids}, {"text": TEXT}, {"messages": MESSAGES}]
    launch = ("--launch", model, "--cache-dir", str(tmp_path / "cache"), "--python", sys.executable)
    first = warm(tmp_path, lines, *launch, "--", *SERVER)
    assert (first["done"], first["failed"], first["cached_tokens"]) == (3, 0, 0)
    assert first["computed_tokens"] == first["prompt_tokens"] > 3 * CHUNK
    assert first["stored_chunks"] == 3
    # Without a time-out vLLM kills its engine when the server stops, also amid a store.
    options = (*SERVER, "--enable-prompt-tokens-details", "--shutdown-timeout", "10")
    with server(tmp_path, model, {"cache_dir": str(tmp_path / "cache")}, options) as running:
        second = warm(tmp_path, [*lines, {"prompt": later}], "--server", running.base)
        assert (second["done"], second["prompt_tokens"]) == (4, first["prompt_tokens"] + len(later))
        assert second["cached_tokens"] == 3 * CHUNK, "one whole chunk of each that was warmed before"
        assert running.metric(LOADED) == 3 * CHUNK
    listed = [sys.executable, "-m", "forebay", "ls", str(tmp_path / "cache"), "--json"]
    rows = json.loads(subprocess.run(listed, check=True, capture_output=True, text=True).stdout)
    assert [row["tokens"] for row in rows] == [CHUNK] * 4, "and one of the prompt that came later"
