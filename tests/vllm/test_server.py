"""The OpenAI server with concurrent clients, and two servers on one cache directory."""

from __future__ import annotations

import contextlib
import json
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

from conftest import environment, prompts, settings

START_S = 200
STOP_S = 30


class Server:
    """One running server."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        """A page."""
        with urllib.request.urlopen(self.base + path, timeout=10) as answer:
            return answer.read().decode()

    def complete(self, prompt: list[int]) -> str:
        """Eight tokens after `prompt`, as text."""
        asked = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            self.base + "/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["choices"][0]["text"]

    def together(self, asked: list[list[int]]) -> list[str]:
        """All prompts at once."""
        with ThreadPoolExecutor(len(asked)) as clients:
            return list(clients.map(self.complete, asked))

    def metric(self, name: str) -> float:
        """A counter of the Prometheus page, summed over its labels."""
        found = re.findall(rf"^{re.escape(name)}(?:_total)?(?:{{[^}}]*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(map(float, found))


@contextlib.contextmanager
def server(
    folder: Path, model: str, cache: dict[str, Any] | None, options: tuple[str, ...] = ("--max-model-len", "2048")
) -> Iterator[Server]:
    """A server until the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8", *options]
    if cache is not None:
        transfer = {"kv_connector": "ForebayConnector", "kv_role": "kv_both", "kv_connector_extra_config": cache}
        command += ["--kv-transfer-config", json.dumps(transfer)]
    log = folder / f"server-{port}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment(folder, separate=True), cwd=folder, stdout=out, stderr=subprocess.STDOUT
        )
    running = Server(port)
    try:
        until = time.monotonic() + START_S
        while True:
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                running.get("/health")
                break
            time.sleep(0.2)
        yield running
        assert process.poll() is None, log.read_text()[-4000:]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def test_concurrent_clients_and_a_second_server_on_the_same_cache(model: str, tmp_path: Path) -> None:
    asked = prompts(6)
    with server(tmp_path, model, None) as bare:
        expected = bare.together(asked)
    cache = settings(tmp_path / "cache")
    with server(tmp_path, model, cache) as first:
        assert first.together(asked) == expected
        with server(tmp_path, model, cache) as second:
            assert second.together(asked) == expected
            loaded = second.metric("vllm:external_prefix_cache_hits")
            print(f"second server loaded {loaded} tokens")
            assert loaded >= 384
        # The other one's end costs this one nothing.
        assert first.together(asked) == expected
