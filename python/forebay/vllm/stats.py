"""Counters of the connector for vLLM: its log line, and its Prometheus page as `vllm:forebay_*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from forebay.connector import counter_names


@dataclass
class ForebayStats(KVConnectorStats):
    """What was counted since the last report."""

    def reset(self) -> None:
        """Starts over."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> ForebayStats:
        """Adds the counters of another report."""
        keys = set(self.data) | set(other.data)
        return ForebayStats({key: self.data.get(key, 0) + other.data.get(key, 0) for key in keys})

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())


class ForebayMetrics(KVConnectorPromMetrics):
    """One counter per name. Those of blending are made when they are first counted."""

    def __init__(self, *args: Any) -> None:
        """As vLLM makes them."""
        super().__init__(*args)
        self._counters: dict[str, Any] = {}
        # From the start: what a counter begins with is no growth, and an alert would not see it.
        for name in counter_names():
            for labels in self.per_engine_labelvalues.values():
                self._counter(name).labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one report."""
        for name, value in transfer_stats_data.items():
            self._counter(name).labels(*self.per_engine_labelvalues[engine_idx]).inc(value)

    def _counter(self, name: str) -> Any:
        if name not in self._counters:
            self._counters[name] = self._counter_cls(
                name=f"vllm:forebay_{name}",
                documentation=f"Forebay connector: {name.replace('_', ' ')}.",
                labelnames=self._labelnames,
            )
        return self._counters[name]
