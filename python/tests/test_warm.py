"""`forebay warm prompts --launch` and the server that it starts: they end together. The server is a stand-in that never answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVER = """
import signal, sys

# Waited for, not handled: one that came just before a pause would be handled after it.
both = {signal.SIGINT, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, both)
print("up", *sys.argv[1:], file=sys.stderr, flush=True)
while True:
    number = signal.sigwait(both)
    print(signal.Signals(number).name, file=sys.stderr, flush=True)
    if number == signal.SIGTERM:
        break
"""


@pytest.fixture
def warming(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The program while it waits for its server, in a group of its own, as a shell's foreground job is."""
    entrypoints = tmp_path / "vllm" / "entrypoints" / "openai"
    entrypoints.mkdir(parents=True)
    for package in (entrypoints, *entrypoints.parents[:2]):
        (package / "__init__.py").touch()
    (entrypoints / "api_server.py").write_text(SERVER)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt_token_ids": [1, 2, 3]}))
    command = [sys.executable, "-m", "forebay", "warm", "prompts", str(tmp_path / "prompts.jsonl")]
    command += ["--launch", "a-model", "--cache-dir", str(tmp_path), "--python", sys.executable, "--", "--dtype", "float32"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    # Shells start what runs in the background with SIGINT ignored, and it is inherited.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()


def said_until_up(process: subprocess.Popen[str]) -> str:
    """The line with which the server comes up."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("up "):
            return line
    raise AssertionError("the server was not started")


def test_the_server_gets_its_arguments(warming: subprocess.Popen[str], tmp_path: Path) -> None:
    arguments = said_until_up(warming).split(maxsplit=1)[1]
    assert "--model a-model" in arguments and arguments.rstrip().endswith("--dtype float32")
    assert json.dumps(str(tmp_path)) in arguments


def test_ctrl_c_reaches_the_server_too(warming: subprocess.Popen[str]) -> None:
    said_until_up(warming)
    os.killpg(warming.pid, signal.SIGINT)
    # The end of what is said comes when the last of both processes has ended.
    _, rest = warming.communicate(timeout=60)
    assert warming.returncode == -signal.SIGINT
    assert set(rest.split()) == {"SIGINT", "SIGTERM"}


def test_the_server_does_not_outlive_the_program(warming: subprocess.Popen[str]) -> None:
    said_until_up(warming)
    warming.kill()
    _, rest = warming.communicate(timeout=60)
    assert rest.split() == ["SIGTERM"]
