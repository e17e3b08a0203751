"""Which vLLM the harness runs against, and where its KV lies. Set before anything imports vLLM."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("harness")
    group.addoption("--vllm", default=None, help="vLLM's version: the environment's own, or 0.33 for its Python files")
    group.addoption("--device", default="cpu", help="where the KV lies: cpu or cuda")


def pytest_configure(config: pytest.Config) -> None:
    import sources

    assert "vllm" not in sys.modules, "vLLM was imported before its version was chosen"
    # The schedulers are the same for every device, and no model runs.
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    version = config.getoption("--vllm", None) or os.environ.get("FOREBAY_HARNESS_VLLM")
    if version:
        sys.path.insert(0, str(sources.python_files(version)))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where the KV lies."""
    return str(request.config.getoption("--device", "cpu"))
