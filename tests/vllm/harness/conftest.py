"""Which vLLM the harness runs against, and where its KV lies. Set before anything imports vLLM."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .fuzz import Tally

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("harness")
    group.addoption("--vllm", default=None, help="vLLM's version: 0.32, the environment's own, or 0.33 by its Python files")
    group.addoption("--device", default="cpu", help="where the KV lies: cpu or cuda")


def pytest_configure(config: pytest.Config) -> None:
    import sources

    assert "vllm" not in sys.modules, "vLLM was imported before its version was chosen"
    # The schedulers are the same for every device, and no model runs.
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    # Kept from run to run: what vLLM finds out about a model's code, for which it would start a
    # process.
    os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(__file__).resolve().parents[3] / "target" / "vllm-cache"))
    version = config.getoption("--vllm", None) or os.environ.get("FOREBAY_HARNESS_VLLM")
    if version in sources.WHEELS:
        sys.path.insert(0, str(sources.python_files(version)))
    import vllm

    assert vllm.__version__.startswith(version or ""), f"vLLM {vllm.__version__}, not {version}"


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where the KV lies."""
    return str(request.config.getoption("--device", "cpu"))


@pytest.fixture(scope="module")
def tally() -> Tally:
    """Of all seeds of a module."""
    from .fuzz import Tally

    return Tally()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What is logged, whether vLLM has set its logger up or not."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog
