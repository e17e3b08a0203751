"""Real vLLM with its own CPU tier above Forebay: outputs are those without a cache after eviction, restart and damage.

Only the copies between KV cache and CPU tier are ours (see copying_spec): vLLM's need a GPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, generate, prompts
from test_damage import flip_bits, remove_data, truncate

READ = "vllm:kv_offload_tiering_read_bytes"
WRITTEN = "vllm:kv_offload_tiering_write_bytes"
FAILED = "vllm:kv_offload_tiering_promotion_job_failures"


def server(cache_dir: Path, cpu_bytes: int = 64 << 20, **tier: Any) -> dict[str, Any]:
    """Arguments of `LLM`."""
    section = {"type": "forebay", "backend": "gds", "gds_config": {"cache_dir": str(cache_dir)}, "capacity": "1GiB"}
    return {
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CopyingTieringSpec",
                "spec_module_path": "copying_spec",
                "cpu_bytes_to_use": cpu_bytes,
                "secondary_tiers": [section | tier],
            },
        }
    }


def run(folder: Path, model: str, cache: Path, rounds: int = 1, cpu_bytes: int = 64 << 20, **tier: Any) -> Run:
    """One process; the same prompts in each round."""
    made = generate(folder, model=model, prompts=prompts(), rounds=rounds, engine=server(cache, cpu_bytes, **tier))
    print({name: value for name, value in made.metrics.items() if "offload" in name})
    return made


@pytest.fixture(scope="module")
def filled_tier(model: str, plain: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds `prompts()`; tests work on copies."""
    folder = tmp_path_factory.mktemp("filled_tier")
    made = run(folder, model, folder / "cache")
    assert made.tokens() == plain
    assert made.metrics.get(WRITTEN, 0) > 0, made.metrics
    return folder / "cache"


def test_what_the_cpu_tier_evicted_comes_back(model: str, plain: list[list[int]], tmp_path: Path) -> None:
    # A CPU tier of four blocks; the prompts have five, and three of each must be in it at once.
    made = run(tmp_path, model, tmp_path / "cache", rounds=2, cpu_bytes=4 << 19)
    assert made.tokens(0) == plain
    assert made.tokens(1) == plain
    assert made.metrics.get(READ, 0) > 0, made.metrics


def test_a_restarted_server_loads(model: str, plain: list[list[int]], filled_tier: Path, tmp_path: Path) -> None:
    shutil.copytree(filled_tier, tmp_path / "cache")
    made = run(tmp_path, model, tmp_path / "cache")
    assert made.tokens() == plain
    assert made.loaded >= 384
    assert made.metrics.get(READ, 0) > 0
    assert made.metrics.get(FAILED, 0) == 0


@pytest.mark.parametrize("damage", [flip_bits, truncate, remove_data], ids=lambda d: d.__name__)
def test_damage_changes_no_output(
    model: str, plain: list[list[int]], filled_tier: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(filled_tier, tmp_path / "cache")
    damage(tmp_path / "cache")
    made = run(tmp_path, model, tmp_path / "cache", rounds=2)
    assert made.tokens(0) == plain
    assert made.tokens(1) == plain
    assert all(output["reason"] == "length" for outputs in made.rounds for output in outputs)
    if damage is flip_bits:
        # The others are found when the cache is opened; flipped bits only by reading them.
        assert made.metrics.get(FAILED, 0) > 0, made.metrics


def test_another_fingerprint_starts_anew(model: str, plain: list[list[int]], filled_tier: Path, tmp_path: Path) -> None:
    shutil.copytree(filled_tier, tmp_path / "cache")
    made = run(tmp_path, model, tmp_path / "cache", fingerprint="other weights")
    assert made.tokens() == plain
    assert made.metrics.get(READ, 0) == 0


@pytest.mark.parametrize(
    ("tier", "engine", "says"),
    [
        ({"capasity": "1GiB"}, {}, "capasity"),
        ({"load_timeout_ms": 3600001}, {}, "use 0 to 3600000 ms"),
        ({}, {"prefix_caching_hash_algo": "xxhash"}, "PYTHONHASHSEED"),
    ],
    ids=["misspelt", "range", "hash"],
)
def test_refused_at_the_start(
    model: str, tmp_path: Path, tier: dict[str, Any], engine: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(AssertionError, match=says):
        generate(tmp_path, model=model, prompts=prompts(1), engine=server(tmp_path / "cache", **tier) | engine)
