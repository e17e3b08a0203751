"""fio as the peer of the benches that run vLLM, and how their figures are shown."""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path

#: Block sizes and depths that fio is tried with; its best counts.
POINTS = [(bs, depth) for bs in ("256k", "1m", "4m") for depth in (8, 32)]
#: Bytes that one of its runs reads.
RUN_BYTES = 512 << 20


def rate(file: Path, point: tuple[str, int]) -> float:
    """Bytes per second that fio reads of `file`."""
    bs, depth = point
    size = min(RUN_BYTES, file.stat().st_size)
    command = ["fio", "--name=peer", f"--filename={file}", "--readonly", "--rw=read", f"--bs={bs}", f"--iodepth={depth}"]
    command += [f"--size={size}", "--ioengine=io_uring", "--direct=1", "--thread", "--output-format=json"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(out[out.index("{") :])["jobs"][0]["read"]["bw_bytes"])


def best(file: Path) -> tuple[str, int]:
    """What fio reads `file` fastest with."""
    point = max(POINTS, key=lambda point: statistics.median(rate(file, point) for _ in range(3)))
    print(f"fio reads best with bs={point[0]} iodepth={point[1]}", flush=True)
    return point


def data(cache: Path) -> Path:
    """The largest file of chunks below `cache`."""
    return max(cache.rglob("data.kv"), key=lambda path: path.stat().st_blocks)


def show(name: str, values: list[float], unit: str = "") -> None:
    """Prints a median and its spread."""
    middle = statistics.median(values)
    print(f"{name:72} {middle:10.3f} {unit:6} ({min(values):.3f} to {max(values):.3f}, {len(values)} rounds)", flush=True)
