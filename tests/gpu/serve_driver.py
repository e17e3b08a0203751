"""What serve_vllm.py and serve_sglang.py share: engines in processes of their own, flipped bits, a table."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = 4096


def run_child(
    program: str, spec: dict[str, Any], files: tuple[Path, Path, Path], environment: dict[str, str], work: Path, limit: float
) -> dict[str, Any]:
    """Runs `program --child` in a process group of its own; what it wrote into its result, also where it failed in the middle.
    `files` are those of the specification, the result and the log."""
    spec_file, result, log = files
    spec_file.write_text(json.dumps(spec))
    result.unlink(missing_ok=True)
    began = time.monotonic()
    with log.open("wb") as to:
        process = subprocess.Popen(
            [sys.executable, program, "--child", spec_file, result], stdout=to, stderr=subprocess.STDOUT,
            env=environment, cwd=work, start_new_session=True,
        )
        try:
            code: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = "over its time"
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    spec_file.unlink()
    seen: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {"steps": []}
    result.unlink(missing_ok=True)
    return seen | {"code": code, "took_s": time.monotonic() - began}


def flip_bits(cache_dir: Path) -> int:
    """Flips a bit in each page of a cache's data that is not empty; how many."""
    source, turned = random.Random(7), 0
    for file in cache_dir.rglob("data.kv"):
        with file.open("r+b") as opened:
            for page in range(1, file.stat().st_size // PAGE):
                opened.seek(page * PAGE)
                if any(opened.read(PAGE)):
                    place = page * PAGE + source.randrange(PAGE)
                    opened.seek(place)
                    byte = opened.read(1)[0]
                    opened.seek(place)
                    opened.write(bytes([byte ^ (1 << source.randrange(8))]))
                    turned += 1
    return turned


class Table:
    """What was seen, and its rows."""

    def __init__(self) -> None:
        """An empty one."""
        self.rows: list[tuple[str, str, str]] = []
        self.seen: dict[str, Any] = {}

    def row(self, part: str, what: str, ok: bool | None) -> None:
        """One line; printed at once too, as a run may be cut short."""
        self.rows.append((part, what, "" if ok is None else "ok" if ok else "FAIL"))
        print("ROW", *self.rows[-1], flush=True)

    def ended(self, part: str, wait: Callable[[], Any]) -> None:
        """An error of one part is not the others'."""
        try:
            wait()
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            self.row(part, "an error of this program", False)

    def close(self, file: Path, work: Path, began: float) -> int:
        """Prints and writes all of it, and removes the folder of work; 0 where nothing failed."""
        file.write_text(json.dumps({"rows": self.rows, "seen": self.seen}))
        shutil.rmtree(work, ignore_errors=True)
        print(f"\n{time.monotonic() - began:.0f} s")
        for part, what, how in self.rows:
            print(f"{part:10} {how:5} {what}")
        failed = sum(how == "FAIL" for _, _, how in self.rows)
        print(f"{failed} failed")
        return 1 if failed or not self.rows else 0
