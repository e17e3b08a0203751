"""Fixtures: a tiny model, a cache directory, and processes with real vLLM in them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
SEED = int(os.environ.get("FOREBAY_TEST_SEED", "7"))
LOADED = "vllm:external_prefix_cache_hits"


def environment(home: Path, separate: bool = False) -> dict[str, str]:
    """Variables for vLLM on two CPU cores without a network; `separate` puts the engine into a process of its own."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if separate else "0",
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }


@dataclass
class Run:
    """What one process generated."""

    rounds: list[list[dict[str, Any]]]
    metrics: dict[str, float]
    log: str

    def tokens(self, number: int = 0) -> list[list[int]]:
        """Generated tokens of a round, per prompt."""
        return [output["tokens"] for output in self.rounds[number]]

    def cached(self, number: int = 0) -> list[int]:
        """Prompt tokens that were not computed in a round, per prompt."""
        return [output["cached"] for output in self.rounds[number]]

    @property
    def loaded(self) -> float:
        """Tokens that vLLM counted as loaded by the connector."""
        return self.metrics.get(LOADED, 0)


def start(folder: Path, separate: bool = False, **spec: Any) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Runs offline.py in a process of its own; the process, and the file with its result."""
    work = Path(tempfile.mkdtemp(dir=folder))
    (work / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, HERE / "offline.py", work / "spec.json", work / "result.json"]
    done = subprocess.run(
        command, env=environment(folder, separate), cwd=work, capture_output=True, text=True, timeout=600, check=False
    )
    return done, work / "result.json"


def generate(folder: Path, separate: bool = False, **spec: Any) -> Run:
    """What offline.py generates in a process of its own."""
    done, written = start(folder, separate, **spec)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    result = json.loads(written.read_text())
    run = Run(result["rounds"], result["metrics"], log)
    shown = {k: v for k, v in run.metrics.items() if "forebay" in k or "external" in k}
    print(f"cached {[run.cached(i) for i in range(len(run.rounds))]} metrics {shown}")
    return run


def prompts(count: int = 3, shared: int = 300, own: int = 130, seed: int = SEED) -> list[list[int]]:
    """Prompts with a common beginning and different ends."""
    print(f"seed {seed}")
    source = random.Random(seed)
    begin = [source.randrange(4, 512) for _ in range(shared)]
    return [begin + [source.randrange(4, 512) for _ in range(own + 13 * i)] for i in range(count)]


def settings(cache_dir: Path, **more: Any) -> dict[str, Any]:
    """`kv_connector_extra_config` of a small cache."""
    return {"backend": "gds", "gds_config": {"cache_dir": str(cache_dir)}, "capacity": "1GiB", "chunk_size": 128} | more


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A tiny model in a type, of a kind that model.py knows; made once."""
    folder = tmp_path_factory.mktemp("models")

    def of(dtype: str, *kind: str) -> str:
        made = folder / "-".join((dtype, *kind))
        if not made.exists():
            subprocess.run([sys.executable, HERE / "model.py", made, dtype, *kind], check=True, env=environment(folder))
        return str(made)

    return of


@pytest.fixture(scope="session")
def model(models: Callable[[str], str]) -> str:
    """The tiny Llama in float32."""
    return models("float32")


@pytest.fixture(scope="session")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM generates for `prompts()` without a connector."""
    return generate(tmp_path_factory.mktemp("plain"), model=model, prompts=prompts()).tokens()
