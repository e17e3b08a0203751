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
PATIENCE_S = 900


def environment(home: Path, separate: bool = False) -> dict[str, str]:
    """Variables for vLLM on two CPU cores without a network; `separate` puts the engine into a process of its own."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        # Tests store on drives that are nearly full, too.
        "FOREBAY_MIN_FREE": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if separate else "0",
        "HOME": str(home),
        # Kept from run to run: what vLLM finds out about a model's code, for which it would start a
        # process each time.
        "VLLM_CACHE_ROOT": str(HERE.parent.parent / "target" / "vllm-cache"),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }


@dataclass
class Run:
    """What one process generated, round by round."""

    rounds: list[list[dict[str, Any]]]
    counters: list[dict[str, float]]
    """vLLM's counters when each round was over."""
    log: str

    def tokens(self, number: int = 0) -> list[list[int]]:
        """Generated tokens of a round, per prompt."""
        return [output["tokens"] for output in self.rounds[number]]

    def cached(self, number: int = 0) -> list[int]:
        """Prompt tokens that were not computed in a round, per prompt."""
        return [output["cached"] for output in self.rounds[number]]

    def reasons(self) -> set[str]:
        """Why outputs ended."""
        return {output["reason"] for outputs in self.rounds for output in outputs}

    @property
    def metrics(self) -> dict[str, float]:
        """Counters at the end."""
        return self.counters[-1]

    @property
    def loaded(self) -> float:
        """Tokens that vLLM counted as loaded by the connector."""
        return self.metrics.get(LOADED, 0)

    def loaded_in(self, number: int) -> float:
        """Those of one round."""
        before = self.counters[number - 1].get(LOADED, 0) if number > 0 else 0
        return self.counters[number].get(LOADED, 0) - before


def start(
    folder: Path, *asked: dict[str, Any], separate: bool = False, rounds: int = 1, **spec: Any
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Runs offline.py in a process of its own; the process, and the file with its result.

    `asked` are its rounds; without them there are `rounds` equal ones of what else is given.
    """
    if not asked:
        one = {key: spec.pop(key) for key in ("prompts", "max_tokens", "salt", "zero_stored", "keep", "lost") if key in spec}
        asked = (one,) * rounds
    work = Path(tempfile.mkdtemp(dir=folder))
    (work / "spec.json").write_text(json.dumps(spec | {"rounds": asked}))
    command = [sys.executable, HERE / "offline.py", work / "spec.json", work / "result.json"]
    done = subprocess.run(
        command, env=environment(folder, separate), cwd=work, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return done, work / "result.json"


def generate(folder: Path, *asked: dict[str, Any], **more: Any) -> Run:
    """What offline.py generates in a process of its own; arguments are those of `start`."""
    began = time.monotonic()
    done, written = start(folder, *asked, **more)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    result = json.loads(written.read_text())
    run = Run([one["outputs"] for one in result], [one["metrics"] for one in result], log)
    shown = {k.removeprefix("vllm:"): v for k, v in run.metrics.items() if "forebay" in k or "external" in k}
    print(f"{time.monotonic() - began:.0f} s, cached {[run.cached(i) for i in range(len(run.rounds))]}, {shown}")
    return run


def prompts(count: int = 3, shared: int = 300, own: int = 130, seed: int = SEED) -> list[list[int]]:
    """Prompts with a common beginning and different ends."""
    print(f"seed {seed}")
    source = random.Random(seed)
    begin = [source.randrange(4, 512) for _ in range(shared)]
    return [begin + [source.randrange(4, 512) for _ in range(own + 13 * i)] for i in range(count)]


def settings(cache_dir: Path, **more: Any) -> dict[str, Any]:
    """`kv_connector_extra_config` of a small cache."""
    return {"backend": "gds", "gds_config": {"cache_dir": str(cache_dir)}, "capacity": "1GiB", "min_free": 0, "chunk_size": 128} | more


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


#: Rounds of the tests that are compared with `plain`: a few tokens, and so many that requests grow.
SHORT, LONG = {"prompts": prompts()}, {"prompts": prompts(6), "max_tokens": 200}


@pytest.fixture(scope="session")
def bare(model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`SHORT` and `LONG` without a connector."""
    return generate(tmp_path_factory.mktemp("plain"), SHORT, LONG, model=model)


@pytest.fixture(scope="session")
def plain(bare: Run) -> list[list[int]]:
    """What vLLM generates for `prompts()` without a connector."""
    return bare.tokens(0)


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
