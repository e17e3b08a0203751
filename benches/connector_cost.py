"""What the connector costs a vLLM server in host time per step: vLLM's own scheduler, the connector in both roles, no model.

    PYTHONPATH=tests/vllm python benches/connector_cost.py --folder DIR [--requests 256] [--layers 32] [--rounds 5]

needs vLLM and the release wheel (`make wheel`) in this Python. Every request's prompt is new (0 hits), everything is stored, generated
tokens too. Shown are microseconds in all of the connector's calls of one step: wall clock, and this thread's CPU time, which leaves out
what other programs take from a busy machine.

Each round runs at another depth of Python's stack: CPython 3.11 keeps frames in chunks of 16 KiB, and maps a new chunk, and unmaps it again,
with every call that happens to be the first beyond one. At such a depth a step costs three times as much, whatever is called.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import server as world
from harness.runner import Rank
from vllm.utils.gc_utils import freeze_gc_heap

SCHEDULER = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "take_events",
    "get_kv_connector_stats",
)
WORKER = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


class Clock:
    """Time spent in the calls of one connector, summed until it is taken."""

    def __init__(self, connector: Any, names: tuple[str, ...]) -> None:
        self.wall = self.cpu = 0
        self.calls: dict[str, list[float]] = {name: [] for name in names}
        for name in names:
            if hasattr(connector, name):
                setattr(connector, name, self._timed(name, getattr(connector, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            try:
                return call(*arguments, **named)
            finally:
                took = time.perf_counter_ns() - wall
                self.wall += took
                self.calls[name].append(took / 1e3)
                self.cpu += time.thread_time_ns() - cpu

        return timed

    def take(self) -> tuple[float, float]:
        """Microseconds (wall, CPU) since the last call."""
        taken = self.wall / 1e3, self.cpu / 1e3
        self.wall = self.cpu = 0
        return taken


def percentile(values: list[float], percent: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


#: About as many frames of `at_depth` as fill a chunk of CPython's stack of frames.
CHUNK_FRAMES = 128


def at_depth(frames: int, call: Callable[[], Any]) -> Any:
    """Calls with so many frames more on the stack."""
    return call() if frames == 0 else at_depth(frames - 1, call)


def fixed_work() -> float:
    """Microseconds that this machine takes just now for a loop in Python, the median of some hundred times: its speed may swing."""
    took = []
    for _ in range(400):
        began = time.perf_counter_ns()
        sum(number & 7 for number in range(1200))
        took.append((time.perf_counter_ns() - began) / 1e3)
    return statistics.median(took)


def run(options: argparse.Namespace, folder: Path, seed: int) -> dict[str, list[tuple[float, float]]]:
    """One server from its first request to its last; times of the steps in which all requests run, each at another place of its chunk."""
    shape = world.Shape(
        ranks=1,
        depth=options.layers,
        blocks=options.requests * 48 + 64,
        max_requests=options.requests,
        batch_tokens=8192,
        settings={"capacity": "4GiB", "chunk_size": 256, "save_decode_cache": True},
    )
    server = world.Server(shape, folder)
    # As vLLM's engine and workers do at the end of their start: the harness has neither.
    freeze_gc_heap()
    # No model: what it would compute is not looked at.
    server.runner._forward = lambda rank, batch: []  # type: ignore[method-assign]
    Rank.poison = lambda self, group, blocks: None  # type: ignore[method-assign]
    clocks = {"scheduler": Clock(server.scheduler.connector, SCHEDULER), "worker": Clock(server.runner.ranks[0].connector, WORKER)}
    source = random.Random(seed)
    for i in range(options.requests):
        prompt = [source.randrange(4, 500) for _ in range(options.prompt + i * 256 // options.requests)]
        server.ask(f"r{i}", prompt, max_tokens=options.tokens)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in clocks}
    while server.step():
        taken = {name: clock.take() for name, clock in clocks.items()}
        if len(server.scheduler.running) == options.requests and not server.scheduler.waiting:
            for name, both in taken.items():
                times[name].append(both)
    server.close()
    if options.calls:
        for clock in clocks.values():
            for name, took in clock.calls.items():
                if took:
                    print(f"    {name:36} {len(took):6} calls: p50 {statistics.median(took):.1f} p99 {percentile(took, 99):.1f} us")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the drive to be used; each round makes a folder in it")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", action="store_true", help="also each call's times, over all steps of a round")
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} is there already: give a folder that is not, or remove it")
    world.HANGS_S = 600.0
    found: dict[str, list[tuple[float, float, float, float]]] = {"scheduler": [], "worker": []}
    for number in range(options.rounds):
        folder = options.folder / f"round{number}"
        folder.mkdir(parents=True)
        print(f"round {number} the machine: {fixed_work():.0f} us for a fixed piece of Python", flush=True)
        times_of = functools.partial(run, options, folder, number)
        for side, times in at_depth(number * CHUNK_FRAMES // options.rounds, times_of).items():
            wall, cpu = [t[0] for t in times], [t[1] for t in times]
            row = (statistics.median(wall), percentile(wall, 99), statistics.median(cpu), percentile(cpu, 99))
            found[side].append(row)
            print(f"round {number} {side:9} {len(times)} steps: wall p50 {row[0]:.0f} p99 {row[1]:.0f} us, CPU p50 {row[2]:.0f} p99 {row[3]:.0f} us", flush=True)
    for side, rows in found.items():
        middle = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"{side}: median of {len(rows)} rounds: wall p50 {middle[0]:.0f}, p99 {middle[1]:.0f}; CPU p50 {middle[2]:.0f}, p99 {middle[3]:.0f} us per step")


if __name__ == "__main__":
    main()
