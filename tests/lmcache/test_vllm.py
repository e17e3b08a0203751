"""Real vLLM on a CPU, whose KV goes through LMCache's multi-process connector and LMCache's server to Forebay and back."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import spec
from test_server import Server, server

VLLM = Path(__file__).resolve().parent.parent / "vllm"
#: LMCache keeps KV in pieces of 256 tokens. No two prompts share one: LMCache does not look for a
#: piece that it is bringing already.
PIECE, PIECES = 256, 2
#: On a machine that is busy with other things too.
PATIENCE_S = 1800


def variables(home: Path) -> dict[str, str]:
    """vLLM without a network. Its engine is in a process of its own, as with `vllm serve`: in this one LMCache's imports would be there when
    vLLM looks through all modules for its kernels, and vLLM ends."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "HOME": str(home),
    }


def prompts() -> list[list[int]]:
    """Prompts that end in the middle of a piece."""
    source = random.Random(7)
    return [[source.randrange(4, 512) for _ in range(PIECE * PIECES + 40)] for _ in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights."""
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, VLLM / "model.py", folder / "tiny", "float32"], check=True, env=variables(folder))
    return folder / "tiny"


def generate(folder: Path, model: Path, to: Server | None = None) -> tuple[list[list[int]], list[int]]:
    """The tokens of one life of vLLM, and how many tokens of each prompt it did not compute."""
    given: dict[str, Any] = {"model": str(model), "rounds": [{"prompts": prompts()}]}
    if to is not None:
        given["transfer"] = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": to.rpc},
        }
    (folder / "spec.json").write_text(json.dumps(given))
    command = [sys.executable, VLLM / "offline.py", folder / "spec.json", folder / "result.json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S, cwd=folder, env=variables(folder))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    (only,) = json.loads((folder / "result.json").read_text())
    return [output["tokens"] for output in only["outputs"]], [output["cached"] for output in only["outputs"]]


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM generates without a connector."""
    return generate(tmp_path_factory.mktemp("plain"), model)[0]


def test_prompts_come_back_after_both_servers_were_restarted(
    model: Path, plain: list[list[int]], cache: Path, tmp_path: Path, door: str
) -> None:
    with server(tmp_path, spec(cache, door)) as first:
        assert generate(tmp_path, model, first) == (plain, [0] * len(plain))
        assert first.from_l2() == []
    with server(tmp_path, spec(cache, door)) as second:
        assert generate(tmp_path, model, second) == (plain, [PIECE * PIECES] * len(plain))
        assert second.from_l2() == [PIECES] * len(plain)
