"""`forebay warm prompts --launch` and the server that it starts, for which a script stands in: they end together."""

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

#: Answers every request, and stores nothing.
ANSWERING = """
import http.server, json, sys

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send({"data": [{"id": "a-model"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send({"usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}})

    def send(self, answer):
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


def command(folder: Path, server: str) -> tuple[list[str], dict[str, str]]:
    """The program's command line and environment, with `server` for vLLM."""
    entrypoints = folder / "vllm" / "entrypoints" / "openai"
    entrypoints.mkdir(parents=True)
    for package in (entrypoints, *entrypoints.parents[:2]):
        (package / "__init__.py").touch()
    (entrypoints / "api_server.py").write_text(server)
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt_token_ids": [1, 2, 3]}))
    words = [sys.executable, "-m", "forebay", "warm", "prompts", str(folder / "prompts.jsonl")]
    words += ["--launch", "a-model", "--cache-dir", str(folder), "--python", sys.executable, "--", "--dtype", "float32"]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return words, os.environ | {"PYTHONPATH": path}


@pytest.fixture
def warming(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The program while it waits for its server, in a group of its own, as a shell's foreground job is."""
    words, variables = command(tmp_path, SERVER)
    # Shells start what runs in the background with SIGINT ignored, and it is inherited.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True)
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


def test_a_server_that_has_stored_nothing_is_told(tmp_path: Path) -> None:
    words, variables = command(tmp_path, ANSWERING)
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "1 sent" in done.stdout and "0 chunks are new" in done.stdout and "forebay probe" in done.stdout
