"""Fixtures: a tiny model, a cache directory, and processes with real vLLM in them."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
SEED = int(os.environ.get("FOREBAY_TEST_SEED", "7"))
LOADED = "vllm:external_prefix_cache_hits"
#: How long one process may take, on a machine that is busy with other things too.
PATIENCE_S = 400


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
        # What vLLM learns of a model's code in a process of its own, which it starts where it does not find it here.
        "VLLM_CACHE_ROOT": str(HERE.parent.parent / "target" / "vllm-cache"),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }


@dataclass
class Run:
    """What one process generated, round by round."""

    rounds: list[dict[str, Any]]
    log: str

    def tokens(self, number: int = 0) -> list[list[int]]:
        """Generated tokens of a round, per prompt."""
        return [output["tokens"] for output in self.rounds[number]["outputs"]]

    def cached(self, number: int = 0) -> list[int]:
        """Prompt tokens that were not computed in a round, per prompt."""
        return [output["cached"] for output in self.rounds[number]["outputs"]]

    def reasons(self) -> set[str]:
        """Why outputs ended."""
        return {output["reason"] for one in self.rounds for output in one["outputs"]}

    def counted(self, name: str, number: int = -1) -> float:
        """A counter of vLLM's when a round was over, the last one unless said."""
        return self.rounds[number]["metrics"].get(name, 0)

    def loaded(self, number: int = 0) -> float:
        """Tokens that vLLM counted as loaded by the connector in a round."""
        before = self.counted(LOADED, number - 1) if number > 0 else 0
        return self.counted(LOADED, number) - before


def generate(folder: Path, *rounds: dict[str, Any], separate: bool = False, **spec: Any) -> Run:
    """Runs offline.py in a process of its own."""
    work = Path(tempfile.mkdtemp(dir=folder))
    (work / "spec.json").write_text(json.dumps(spec | {"rounds": rounds}))
    command = [sys.executable, HERE / "offline.py", work / "spec.json", work / "result.json"]
    began = time.monotonic()
    done = subprocess.run(
        command, env=environment(folder, separate), cwd=work, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    run = Run(json.loads((work / "result.json").read_text()), log)
    shown = {k.removeprefix("vllm:"): v for k, v in run.rounds[-1]["metrics"].items() if "forebay" in k or "external" in k}
    print(f"{time.monotonic() - began:.0f} s, cached {[run.cached(i) for i in range(len(rounds))]}, {shown}")
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
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The tiny model in a type; made once."""
    folder = tmp_path_factory.mktemp("models")

    def of(dtype: str) -> str:
        made = folder / dtype
        if not made.exists():
            subprocess.run([sys.executable, HERE / "model.py", made, dtype], check=True, env=environment(folder))
        return str(made)

    return of


@pytest.fixture(scope="session")
def model(models: Callable[[str], str]) -> str:
    """The tiny Llama in float32."""
    return models("float32")


@dataclass
class Plain:
    """What vLLM generates without a connector."""

    short: list[list[int]]
    """A few tokens after `prompts()`."""
    long: list[list[int]]
    """Many tokens after `prompts(6)`."""


#: Rounds of `Plain`, and of the tests that are compared with it.
SHORT, LONG = {"prompts": prompts()}, {"prompts": prompts(6), "max_tokens": 200}


@pytest.fixture(scope="session")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Made once."""
    run = generate(tmp_path_factory.mktemp("plain"), SHORT, LONG, model=model)
    return Plain(run.tokens(0), run.tokens(1))


@dataclass
class Filled:
    """The run that most tests look at, and the cache that it leaves."""

    run: Run
    cache: Path

    def copy(self, folder: Path) -> Path:
        """The cache, for a test that changes it."""
        return Path(shutil.copytree(self.cache, folder / "cache"))


@pytest.fixture(scope="session")
def filled(model: str, tmp_path_factory: pytest.TempPathFactory) -> Filled:
    """One vLLM with few blocks and small steps: prompts are computed in pieces, and requests are preempted."""
    folder = tmp_path_factory.mktemp("filled")
    rounds = (SHORT, SHORT, LONG, LONG, SHORT | {"salt": "tenant"}, SHORT | {"salt": "tenant"}, SHORT | {"salt": "other"})
    # Six requests of four to five blocks that grow while 18 blocks are there.
    engine = {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 128, "enable_chunked_prefill": True}
    run = generate(folder, *rounds, model=model, cache=settings(folder / "cache"), engine=engine)
    return Filled(run, folder / "cache")
