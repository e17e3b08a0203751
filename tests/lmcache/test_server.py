"""LMCache's real server over Forebay, driven by LMCache's own `bench server` on a CPU: its checksums, restarts, kills, two servers."""

from __future__ import annotations

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
        """Chunks that each lookup so far brought from L2, which is Forebay; lookups that found nothing at all are left out."""
        return [int(count) for count in re.findall(r"\((?:\d+) L1, (\d+) L2\)", self.log.read_text())]

    def firsts_from_l2(self) -> list[int]:
        """The same of the first of the two lookups of each prompt of `bench`, where all of them found something."""
        return self.from_l2()[::2]


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


def bench(to: Server, is_whole: bool = True) -> dict[int, str]:
    """LMCache's own client: stores and retrieves prompts; the checksum of what was retrieved for each. Each is found whole or not at all if
    `is_whole`: of one that is found in part the client compares what it has stored with all that it has retrieved, and says that they differ."""
    command = [sys.executable, "-m", "lmcache.cli.main", "bench", "server", "--rpc-url", f"tcp://localhost:{to.rpc}", "--mode", "cpu"]
    command += ["--url", f"http://localhost:{to.http}", "--start", "0", "--end", str(REQUESTS), "--interval", "0"]
    command += ["--kvcache-shape-spec", "(2,256,16,8,64):float32:4", "--num-blocks", "256", "--num-tokens", str(256 * CHUNKS)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    if is_whole:
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert re.search(r"Checksum FAIL:\s+0\b", done.stdout), done.stdout[-4000:]
    lines = re.findall(rf"\[seq (\d+)/warm\] CHECKSUM: (\w+) \(.*\b{CHUNKS} chunks\)", done.stdout)
    assert len(lines) == REQUESTS, done.stdout[-4000:] + done.stderr[-4000:]
    return {int(request): digest for request, digest in lines}


def wait_until_stored(cache: Path) -> None:
    """Waits until another process reads all values from the drive: a restart finds what is there, whatever happens to the server."""
    end = time.monotonic() + PATIENCE_S
    stored = 0
    while stored < REQUESTS * CHUNKS:
        assert time.monotonic() < end, f"{stored} values are on the drive"
        command = [sys.executable, "-m", "forebay", "stat", str(cache), "--json"]
        done = subprocess.run(command, check=True, capture_output=True)
        shards = [shard for drive in json.loads(done.stdout)["drives"] for name in drive["namespaces"] for shard in name["shards"]]
        stored = sum(shard["objects"] for shard in shards)


@pytest.fixture(params=["native_plugin", "plugin"])
def door(request: pytest.FixtureRequest) -> str:
    """Which of LMCache's types of adapters."""
    return request.param


# In CI through one door: the other one's values come back after a restart in test_adapter.py too.
@pytest.mark.parametrize("door", ["native_plugin", pytest.param("plugin", marks=pytest.mark.ci)])
def test_a_restarted_server_retrieves_the_same_bytes_from_the_drive(cache: Path, tmp_path: Path, door: str) -> None:
    with server(tmp_path, spec(cache, door)) as first:
        stored = bench(first)
        assert len(stored) == REQUESTS and max(first.from_l2()) == 0
    with server(tmp_path, spec(cache, door)) as second:
        assert bench(second) == stored
        assert second.firsts_from_l2() == [CHUNKS] * REQUESTS


def test_a_killed_server_loses_nothing_that_was_on_the_drive_and_serves_no_other_bytes(cache: Path, tmp_path: Path, door: str) -> None:
    with server(tmp_path, spec(cache, door)) as first:
        stored = bench(first)
        wait_until_stored(cache)
        first.kill()
    with server(tmp_path, spec(cache, door)) as second:
        assert bench(second) == stored
        assert second.firsts_from_l2() == [CHUNKS] * REQUESTS


def test_a_second_server_finds_what_the_first_has_stored(cache: Path, tmp_path: Path, door: str) -> None:
    with server(tmp_path, spec(cache, door)) as first, server(tmp_path, spec(cache, door)) as second:
        stored = bench(first)
        assert bench(second) == stored
        assert second.from_l2()[0] == CHUNKS


def test_faults_that_lmcache_injects_are_misses(cache: Path, tmp_path: Path, door: str) -> None:
    with server(tmp_path, spec(cache, door)) as first:
        stored = bench(first)
        wait_until_stored(cache)
    gap = 2
    line = f'{{"type": "fault_inject", "gap_indices": [{gap}], "inner": {spec(cache, door)}}}'
    with server(tmp_path, line) as second:
        # What follows the gap is computed, and stored again.
        assert bench(second, is_whole=False) == stored
        assert second.firsts_from_l2() == [gap] * REQUESTS
    with server(tmp_path, spec(cache, door)) as third:
        assert bench(third) == stored
        assert third.firsts_from_l2() == [CHUNKS] * REQUESTS
