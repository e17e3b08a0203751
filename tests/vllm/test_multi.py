"""Forebay inside vLLM's MultiConnector, before and after another connector; of vLLM's own, the example connector is the one that runs
on a CPU. It loads within a step, Forebay before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import generate, prompts, settings, start


def multi(folder: Path, forebay_first: bool, policy: str | None = "recompute", example: str = "example") -> dict[str, Any]:
    """`kv_transfer_config` of both connectors."""
    ours = {
        "kv_connector": "ForebayConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings(folder / "cache"),
    }
    (folder / example).mkdir(exist_ok=True)
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / example)},
    }
    children = [ours, other] if forebay_first else [other, ours]
    made: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    return made if policy is None else made | {"kv_load_failure_policy": policy}


@pytest.mark.parametrize("first", [True, False], ids=["forebay-first", "forebay-second"])
def test_outputs_in_both_orders(model: str, plain: list[list[int]], tmp_path: Path, first: bool) -> None:
    asked = {"model": model, "prompts": prompts()}
    cold = generate(tmp_path, **asked, transfer=multi(tmp_path, first), rounds=2)
    assert cold.tokens(0) == plain
    assert cold.tokens(1) == plain
    assert all(cached >= 384 for cached in cold.cached(1)), "the second round must come from a connector"
    ours = cold.metrics.get("vllm:forebay_loaded_tokens", 0)
    assert (ours >= 384) == first, "the first that has the prompt loads it"
    # After a restart, with nothing in the other connector: what was stored beside it is Forebay's.
    restarted = generate(tmp_path, **asked, transfer=multi(tmp_path, first, example="empty"))
    assert restarted.tokens() == plain
    assert all(cached >= 384 for cached in restarted.cached())
    assert restarted.metrics["vllm:forebay_loaded_tokens"] >= 384


def test_an_outer_policy_that_fails_requests_is_refused(model: str, tmp_path: Path) -> None:
    # vLLM's default; from inside only a copy of it can be changed.
    done, written = start(tmp_path, model=model, prompts=prompts(1), transfer=multi(tmp_path, True, None))
    assert done.returncode != 0
    assert not written.exists()
    assert "kv_load_failure_policy of MultiConnector is fail" in done.stdout + done.stderr
