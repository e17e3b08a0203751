"""The connector's two sides, for adapters of serving engines.

`SchedulerSide` says what of a prompt can be loaded and turns each step into bytes for the workers; `WorkerSide` starts the loads and
stores of those bytes and says when they are over; `settings` gives the settings in effect, `chunk_tokens` the chunk size that fits a server's
blocks. docs/connector.md has the calls in order.
"""

from ._forebay import SchedulerSide, WorkerSide, chunk_tokens, counter_names, gauge_names, settings

__all__ = ["SchedulerSide", "WorkerSide", "chunk_tokens", "counter_names", "gauge_names", "settings"]
