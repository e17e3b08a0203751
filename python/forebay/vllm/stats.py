"""What the connector counts, for vLLM: its log line, and its Prometheus page as `vllm:forebay_*`.

A report names a counter `name` or `name:cause`, and has by how much it grew. It names a gauge with its value, as long as that is not 0 and once when it is
0 again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from forebay.connector import counter_names, gauge_names

GAUGES = frozenset(gauge_names())


@dataclass
class ForebayStats(KVConnectorStats):
    """What was counted since the last report."""

    def reset(self) -> None:
        """Starts over."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> ForebayStats:
        """Adds the counters of another report; of a gauge the larger value holds."""
        both = dict(self.data)
        for name, value in other.data.items():
            before = both.get(name, 0)
            both[name] = max(before, value) if name in GAUGES else before + value
        return ForebayStats(both)

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class ForebayMetrics(KVConnectorPromMetrics):
    """One metric per name. Those of blending are made when they are first counted."""

    def __init__(self, *args: Any) -> None:
        """As vLLM makes them."""
        super().__init__(*args)
        self._metrics: dict[str, Any] = {}
        # From the start: what a counter begins with is no growth, and an alert would not see it.
        for name in counter_names():
            for engine in self.per_engine_labelvalues:
                self._of(name, engine)
        for name in GAUGES:
            for engine in self.per_engine_labelvalues:
                self._of(name, engine).set(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one report."""
        for name, value in transfer_stats_data.items():
            metric = self._of(name, engine_idx)
            metric.set(value) if name in GAUGES else metric.inc(value)

    def _of(self, key: str, engine: int) -> Any:
        name, _, cause = key.partition(":")
        if name not in self._metrics:
            told = {"name": f"vllm:forebay_{name}", "documentation": f"Forebay connector: {name.replace('_', ' ')}."}
            labels = [*self._labelnames, *(["cause"] if cause else [])]
            if name in GAUGES:
                self._metrics[name] = self._gauge_cls(**told, labelnames=labels, multiprocess_mode="mostrecent")
            else:
                self._metrics[name] = self._counter_cls(**told, labelnames=labels)
        return self._metrics[name].labels(*self.per_engine_labelvalues[engine], *([cause] if cause else []))
