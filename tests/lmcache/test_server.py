"""LMCache's real server over Forebay, driven by LMCache's own `bench server` on a CPU: its checksums, restarts, kills, two servers."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import spec

REQUESTS, CHUNKS = 3, 4
PATIENCE_S = 120


def port() -> socket.socket:
    """Holds a free port: while this lives, only who asks for this very port, as the server does, gets it too."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    rpc: int
    http: int
    log: Path

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def from_l2(self) -> list[int]:
        """Chunks that each lookup so far brought from L2, which is Forebay."""
        return [int(count) for count in re.findall(r"\((?:\d+) L1, (\d+) L2\)", self.log.read_text())]


@contextmanager
def server(folder: Path, line: str) -> Iterator[Server]:
    """LMCache's server with one L2 adapter; stopped in the end as a user stops it."""
    ports = port(), port()
    rpc, http = (held.getsockname()[1] for held in ports)
    log = folder / f"server-{rpc}.log"
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--port", str(rpc), "--http-port", str(http), "--l2-adapter", line]
    command += ["--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU", "--disable-metrics"]
    command += ["--supported-transfer-mode", "auto"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{http}/healthcheck", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
                time.sleep(0.2)
        yield Server(process, rpc, http, log)
    finally:
        for held in ports:
            held.close()
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def bench(to: Server) -> dict[int, str]:
    """LMCache's own client: stores and retrieves prompts; the checksum of what was retrieved for each."""
    command = [sys.executable, "-m", "lmcache.cli.main", "bench", "server", "--rpc-url", f"tcp://localhost:{to.rpc}", "--mode", "cpu"]
    command += ["--url", f"http://localhost:{to.http}", "--start", "0", "--end", str(REQUESTS), "--interval", "0"]
    command += ["--kvcache-shape-spec", "(2,256,16,8,64):float32:4", "--num-blocks", "256", "--num-tokens", str(256 * CHUNKS)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert re.search(r"Checksum FAIL:\s+0\b", done.stdout), done.stdout[-4000:]
    return {int(request): digest for request, digest in re.findall(r"\[seq (\d+)/warm\] CHECKSUM: (\w+)", done.stdout)}


@pytest.fixture(params=["native_plugin", "plugin"])
def door(request: pytest.FixtureRequest) -> str:
    """Which of LMCache's types of adapters."""
    return request.param


@pytest.mark.ci
def test_a_restarted_server_retrieves_the_same_bytes_from_the_drive(cache: Path, tmp_path: Path, door: str) -> None:
    with server(tmp_path, spec(cache, door)) as first:
        stored = bench(first)
        assert len(stored) == REQUESTS and max(first.from_l2()) == 0
    with server(tmp_path, spec(cache, door)) as second:
        assert bench(second) == stored
        assert second.from_l2()[0] == CHUNKS


def test_a_killed_server_serves_no_other_bytes_afterwards(cache: Path, tmp_path: Path, door: str) -> None:
    with server(tmp_path, spec(cache, door)) as first:
        stored = bench(first)
        first.kill()
    with server(tmp_path, spec(cache, door)) as second:
        # What was not on the drive yet is stored again; what was there is found.
        assert bench(second) == stored
        assert max(second.from_l2()) == CHUNKS


def test_a_second_server_finds_what_the_first_has_stored(cache: Path, tmp_path: Path, door: str) -> None:
    with server(tmp_path, spec(cache, door)) as first, server(tmp_path, spec(cache, door)) as second:
        stored = bench(first)
        assert bench(second) == stored
        assert second.from_l2()[0] == CHUNKS


def test_faults_that_lmcache_injects_are_misses(cache: Path, tmp_path: Path, door: str) -> None:
    line = '{"type": "fault_inject", "rate": 0.5, "inner": ' + spec(cache, door) + "}"
    with server(tmp_path, line) as first:
        stored = bench(first)
    with server(tmp_path, spec(cache, door)) as second:
        assert bench(second) == stored
