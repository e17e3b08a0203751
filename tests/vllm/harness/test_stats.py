"""What the connector counts, on its way to vLLM's page of metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from forebay.connector import counter_names, gauge_names
from forebay.vllm.scheduling import SchedulerHalf
from forebay.vllm.stats import ForebayMetrics, ForebayStats
from prometheus_client import REGISTRY, Counter, Gauge, Histogram


def test_counters_add_up_and_of_a_gauge_the_worst_holds() -> None:
    one, other = ForebayStats({"loads": 2, "closed": 1, "shed_chunks:no_space": 3}), ForebayStats({"loads": 1, "closed": 0, "drives_down": 2})
    both = one.aggregate(other)
    assert both.data == {"loads": 3, "closed": 1, "shed_chunks:no_space": 3, "drives_down": 2}
    assert both.reduce() == both.data and not both.is_empty() and ForebayStats({}).is_empty()


def test_a_gauge_of_the_scheduler_is_the_one_of_the_workers() -> None:
    half = object.__new__(SchedulerHalf)
    half._planner = None
    half._side = SimpleNamespace(get_kv_connector_stats=lambda: {"remote_failing": 1, "queries": 2})  # type: ignore[assignment]
    assert half.get_kv_connector_stats() == {"remote_failing": 1, "scheduler_queries": 2}


def test_the_page_has_all_from_the_start_with_causes_as_labels() -> None:
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = ForebayMetrics(config, {Gauge: Gauge, Counter: Counter, Histogram: Histogram}, ["engine"], {0: ["0"]})

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"vllm:forebay_{name}", {"engine": "0", **labels})

    for key in counter_names():
        name, _, cause = key.partition(":")
        assert value(f"{name}_total", **({"cause": cause} if cause else {})) == 0, key
    assert [value(name) for name in gauge_names()] == [0] * len(gauge_names())
    metrics.observe({"missed_chunks:corrupt": 2, "drives_down": 1, "blend_requests": 1})
    metrics.observe({"missed_chunks:corrupt": 1, "drives_down": 0})
    assert (value("missed_chunks_total", cause="corrupt"), value("drives_down"), value("blend_requests_total")) == (3, 0, 1)
