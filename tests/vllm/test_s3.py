"""Real vLLM over a real S3 server on the loopback: `make vllm-s3` starts the server's program and names it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SHORT, generate, prompts, settings
from test_events import BLOCK, CHUNK, blocks, subscriber
from vllm.distributed.kv_events import BlockStored

SERVER = os.environ.get("FOREBAY_S3_SERVER", "")
#: Whole chunks of the shortest prompt.
WHOLE = 384

pytestmark = pytest.mark.skipif(not SERVER, reason="no S3 server; make vllm-s3 has one")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an empty store, whose credentials are in the environment."""
    folder = tmp_path / "s3"
    command = [SERVER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        for line in iter(server.stdout.readline, "\n"):
            name, _, value = line.strip().partition("=")
            monkeypatch.setenv(name, value)
        yield "s3://kv-cache/vllm"
        server.stdin.close()


@pytest.mark.parametrize("memory", [False, True], ids=["drive", "memory"])
def test_a_second_machine_finds_what_the_first_has_uploaded(
    model: str, plain: list[list[int]], tmp_path: Path, store: str, memory: bool
) -> None:
    tiers = {"remote_url": store, "local_cpu": memory, "max_local_cpu_size": "64MiB", "load_timeout_ms": 60_000}
    first = generate(tmp_path, SHORT, model=model, cache=settings(tmp_path / "a", **tiers))
    assert first.tokens() == plain
    assert first.loaded_in(0) == 0

    second = generate(tmp_path, SHORT, SHORT, model=model, cache=settings(tmp_path / "b", **tiers))
    assert [second.tokens(number) for number in range(2)] == [plain] * 2
    assert all(cached >= WHOLE for cached in second.cached(0)), "all of it from the store"


def test_routers_hear_of_what_has_been_uploaded(model: str, tmp_path: Path, store: str) -> None:
    with subscriber() as listening:
        told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": listening.endpoint}
        engine = {"block_size": BLOCK, "kv_events_config": told}
        cache = settings(tmp_path / "a", chunk_size=CHUNK, remote_url=store, load_timeout_ms=60_000)
        # Uploads of the first round are told with steps of the second.
        generate(tmp_path, SHORT, {"prompts": prompts(), "max_tokens": 200}, model=model, cache=cache, engine=engine)
    stored = [event for event in listening.events if isinstance(event, BlockStored) and event.medium == "STORAGE"]
    local, remote = (blocks([event for event in stored if event.locality == where]) for where in ("LOCAL", "REMOTE"))
    assert remote.items() <= local.items(), "other hashes, parents or tokens than those of the drives"
    seen = {tuple(p[: i + BLOCK]) for p in prompts() for i in range(0, len(p) // CHUNK * CHUNK, BLOCK)}
    assert len(remote) >= len(seen)
