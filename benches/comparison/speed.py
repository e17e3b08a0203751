"""How fast the systems store and bring back the same values, and what that costs the processors.

Usage: speed.py FOLDER ROUNDS SYSTEM...: prints one line of JSON. All systems in turn, in each round in another order, with the same values, the same
number of tasks under way, an empty folder before each put, and the page cache dropped before each put and get (this needs root). Times and processor
seconds are the process's own, so they include every thread of the system. Every byte that was brought back is compared, outside the times.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from systems import RAW_BLOCK_META, SYSTEMS, Arena

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: Length of a value, values, values of a task, tasks under way.
SHAPES = ((32 * MIB, 16, 2, 4), (256 * KIB, 1024, 32, 4))


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(work: Callable[[], list[bool]], count: int, length: int) -> dict[str, float]:
    begun, used = time.monotonic(), processor_s()
    answers = work()
    seconds, used = time.monotonic() - begun, processor_s() - used
    if answers != [True] * count:
        raise RuntimeError(f"{answers.count(False)} of {count} values were refused")
    gib = count * length / GIB
    return {"gib_per_s": gib / seconds, "cpu_s_per_gib": used / gib}


def cold() -> None:
    """Nothing of what was written is in memory or still on its way."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


#: What is added to a system's name: its device is made anew for each round, with its space but
#: not written.
ON_NEW_SPACE = "-new"


def new_device(folder: Path, capacity: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with (folder / "device").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, capacity)


def used_device(folder: Path, capacity: int) -> None:
    """An empty device for raw block that was written before, as devices are: the first writes of a file allocate."""
    folder.mkdir(exist_ok=True)
    device = folder / "device"
    is_new = not device.exists()
    with device.open("wb" if is_new else "r+b") as file:
        for _ in range(0, capacity if is_new else RAW_BLOCK_META, MIB):
            file.write(bytes(MIB))


def once(name: str, folder: Path, arena: Arena, shape: tuple[int, int, int, int], last: int) -> dict[str, Any]:
    """Puts all values into an empty folder, closes, and brings them back cold."""
    length, count, per_task, tasks = shape
    capacity = 2 * count * length + 64 * MIB
    numbers = range(last, last + count)
    name, is_new = name.removesuffix(ON_NEW_SPACE), name.endswith(ON_NEW_SPACE)
    if name == "lmcache-raw_block":
        (new_device if is_new else used_device)(folder, capacity)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    for at, number in enumerate(numbers):
        arena.fill(at, number)
    cold()
    # The first tasks of a process touch its memory for the first time; they are others, and not
    # measured.
    others, first = range(last + count, last + count + per_task * tasks), range(per_task * tasks)
    system = SYSTEMS[name](folder, arena, capacity)
    system.put(others, first, per_task, tasks)
    cold()
    put = timed(lambda: system.put(numbers, range(count), per_task, tasks), count, length)
    system.close()
    arena.memory.zero_()
    system = SYSTEMS[name](folder, arena, capacity)
    system.get(others, first, per_task, tasks)
    arena.memory.zero_()
    cold()
    get = timed(lambda: system.get(numbers, range(count), per_task, tasks), count, length)
    wrong = sum(not arena.is_value(at, number) for at, number in enumerate(numbers))
    system.close()
    if wrong:
        raise RuntimeError(f"{name}: {wrong} values were served with other bytes")
    return {"put": put, "get": get}


def main() -> None:
    folder, rounds, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    results = []
    for shape in SHAPES:
        arena = Arena(shape[1], shape[0])
        seen: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for turn in range(rounds):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            for name in order:
                seen[name].append(once(name, folder / name, arena, shape, turn * 2 * shape[1]))
        for name in names:
            shutil.rmtree(folder / name)
        results.append({"length": shape[0], "count": shape[1], "per_task": shape[2], "tasks": shape[3], "seen": seen})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
