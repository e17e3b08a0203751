"""The OpenAI server with concurrent clients, and two servers on one cache directory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, environment, prompts, settings

#: How long a server may take to answer, on a machine that is busy with other things too.
START_S = 900
STOP_S = 30


class Server:
    """One running server."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        """A page."""
        with urllib.request.urlopen(self.base + path, timeout=10) as answer:
            return answer.read().decode()

    def complete(self, prompt: list[int], **more: Any) -> list[int]:
        """Eight tokens after `prompt`."""
        asked = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | more
        request = urllib.request.Request(
            self.base + "/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["choices"][0]["token_ids"]

    def together(self, asked: list[list[int]]) -> list[list[int]]:
        """All prompts at once."""
        with ThreadPoolExecutor(len(asked)) as clients:
            return list(clients.map(self.complete, asked))

    def metric(self, name: str) -> float:
        """A counter of the Prometheus page, summed over its labels."""
        found = re.findall(rf"^{re.escape(name)}(?:_total)?(?:{{[^}}]*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(map(float, found))


class Starting:
    """A server process that may not be up yet."""

    def __init__(self, folder: Path, model: str, cache: dict[str, Any] | None, options: tuple[str, ...]) -> None:
        """Starts it."""
        # While this lives, only who asks for this very port, as the server does, gets it too.
        self.held = socket.socket()
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.held.bind(("127.0.0.1", 0))
        port = self.held.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
        command += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8", *options]
        if cache is not None:
            transfer = {"kv_connector": "ForebayConnector", "kv_role": "kv_both", "kv_connector_extra_config": cache}
            command += ["--kv-transfer-config", json.dumps(transfer)]
        self.log = folder / f"server-{port}.log"
        with self.log.open("w") as out:
            # A group of its own, so that all its processes can be killed at once.
            self.process = subprocess.Popen(
                command,
                env=environment(folder, separate=True),
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.server = Server(port)

    def up(self) -> Server:
        """Waits until it answers."""
        until = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()[-4000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                self.server.get("/health")
                return self.server
            time.sleep(0.2)

    def kill(self) -> None:
        """Ends it without a chance to do anything more."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Asks it to end."""
        self.held.close()
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()


@contextlib.contextmanager
def server(
    folder: Path, model: str, cache: dict[str, Any] | None, options: tuple[str, ...] = ("--max-model-len", "2048")
) -> Iterator[Server]:
    """A server until the end of the block."""
    starting = Starting(folder, model, cache, options)
    try:
        yield starting.up()
        assert starting.process.poll() is None, starting.log.read_text()[-4000:]
    finally:
        starting.stop()


def until_stored(server: Server, asked: list[list[int]], cache: Path, chunks: int) -> None:
    """Waits until a cache has so many chunks; asks again now and then, as a slow drive sheds what it has no room for in time."""
    list_ = [sys.executable, "-m", "forebay", "ls", str(cache), "--json"]
    until = time.monotonic() + START_S
    while len(listed := json.loads(subprocess.run(list_, check=True, capture_output=True, text=True).stdout)) < chunks:
        assert time.monotonic() < until, listed
        time.sleep(1)
        server.together(asked)


@pytest.mark.ci
def test_concurrent_clients_and_a_second_server_on_the_same_cache(model: str, bare: Run, tmp_path: Path) -> None:
    asked, expected = prompts(6), [tokens[:8] for tokens in bare.tokens(1)]
    cache = settings(tmp_path / "cache")
    both = [Starting(tmp_path, model, cache, ("--max-model-len", "2048")) for _ in range(2)]
    try:
        first, second = (one.up() for one in both)
        assert first.together(asked) == expected
        # Two that all begin with, and one of each.
        until_stored(first, asked, tmp_path / "cache", 2 + len(asked))
        assert second.together(asked) == expected
        loaded = second.metric("vllm:external_prefix_cache_hits")
        print(f"second server loaded {loaded} tokens")
        assert loaded >= 384
        # One's end, however it comes, costs the other nothing: also what it stores now is found.
        both[0].kill()
        fresh = prompts(2, seed=99)
        again = second.together(fresh)
        assert second.together(asked) == expected
        assert again == second.together(fresh)
    finally:
        for one in both:
            one.stop()
