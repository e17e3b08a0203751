"""What one system serves, loses and writes when something goes wrong.

Usage: faults.py SYSTEM FAULT FOLDER: prints what happened as one line of JSON. The folder is empty, and on the drive that is meant. Every value
that a system says it has brought is compared with what was stored, and counted as right, wrong (other bytes were served) or missing.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from systems import SYSTEMS, Arena, System, value

MIB = 1 << 20
LENGTH, COUNT = MIB, 64
CAPACITY = 512 * MIB
KILLS = 6


def checked(system: System, arena: Arena, numbers: Sequence[int]) -> dict[str, int]:
    """Brings the values one by one, and looks at every byte."""
    seen = {"right": 0, "wrong": 0, "missing": 0}
    for number in numbers:
        arena.slot(0).zero_()
        (there,) = system.get([number], [0])
        seen["missing" if not there else "right" if arena.is_value(0, number) else "wrong"] += 1
    return seen


def stored(system: System, arena: Arena, numbers: Sequence[int]) -> list[int]:
    """Stores the values, as many at once as the arena has slots; those that were answered with yes."""
    taken = []
    for first in range(0, len(numbers), arena.slots):
        part = numbers[first : first + arena.slots]
        for at, number in enumerate(part):
            arena.fill(at, number)
        taken += [number for number, yes in zip(part, system.put(part, range(len(part))), strict=True) if yes]
    return taken


def files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def on_drive(folder: Path) -> int:
    """Bytes that the files take."""
    total = 0
    for path in files(folder):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def where(folder: Path, number: int) -> tuple[Path, int]:
    """The file that has the middle of a value, and where."""
    middle = value(number, LENGTH)[LENGTH // 2 : LENGTH // 2 + 64].numpy().tobytes()
    for path in files(folder):
        if path.stat().st_size < LENGTH:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if (at := data.find(middle)) >= 0:
                return path, at
    raise LookupError(f"value {number} is in no file as it was given")


class Run:
    """One system over one folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.arena = name, folder, Arena(8, LENGTH)

    def open(self, capacity: int = CAPACITY) -> System:
        return SYSTEMS[self.name](self.folder, self.arena, capacity)

    def filled(self) -> list[int]:
        """A folder with values, and nothing open."""
        system = self.open()
        numbers = stored(system, self.arena, range(COUNT))
        system.close()
        return numbers

    def restart(self) -> dict[str, Any]:
        numbers = self.filled()
        system = self.open()
        found = sum(system.has(numbers))
        seen = checked(system, self.arena, numbers)
        system.close()
        return {"stored": len(numbers), "found": found, **seen}

    def flipped_bit(self) -> dict[str, Any]:
        numbers = self.filled()
        turned = numbers[::4]
        for number in turned:
            path, at = where(self.folder, number)
            with path.open("r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1 << number % 8]))
        system = self.open()
        damaged = checked(system, self.arena, turned)
        others = checked(system, self.arena, [number for number in numbers if number not in turned])
        # Once more: whether what is damaged is still offered.
        offered = sum(system.has(turned))
        system.close()
        return {"turned": len(turned), "damaged": damaged, "others": others, "offered_again": offered}

    def cut_file(self) -> dict[str, Any]:
        numbers = self.filled()
        path, at = where(self.folder, numbers[len(numbers) // 2])
        os.truncate(path, at)
        try:
            system = self.open()
        except Exception as error:  # what a server's log would have
            return {"stored": len(numbers), "refused": f"{type(error).__name__}: {error}"[:200]}
        seen = checked(system, self.arena, numbers)
        system.close()
        return {"stored": len(numbers), **seen}

    def kills(self) -> dict[str, Any]:
        """Processes that store, each killed while it does."""
        # Nothing is evicted: what is missing is lost.
        source, answered, first, large = random.Random(1), set(), 0, 4096 * MIB
        for _ in range(KILLS):
            out, into = os.pipe()
            child = os.fork()
            if child == 0:
                system = self.open(large)
                for start in range(first, first + 256, 8):
                    taken = stored(system, self.arena, range(start, start + 8))
                    os.write(into, "".join(f"{number}\n" for number in taken).encode())
                os._exit(0)
            os.close(into)
            # Killed at a random time after the first answer.
            said = os.read(out, 1 << 16)
            time.sleep(source.uniform(0.05, 0.6))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            while more := os.read(out, 1 << 16):
                said += more
            os.close(out)
            now = [int(line) for line in said.decode().split("\n")[:-1]]
            answered |= set(now)
            first = max(now, default=first) + 256
        numbers = sorted(answered)
        system = self.open(large)
        seen = checked(system, self.arena, numbers)
        system.close()
        left = sum(path.stat().st_size for path in files(self.folder) if path.suffix == ".tmp")
        return {"kills": KILLS, "answered": len(numbers), **seen, "left_in_temporary_files": left}

    def full_drive(self) -> dict[str, Any]:
        """Another program takes the drive's space while values are stored, then gives it back."""
        image, mount = self.folder / "image", self.folder / "mount"
        mount.mkdir()
        with image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 1024 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, mount], check=True)
        try:
            return self._full_drive(mount)
        finally:
            unmount(mount)

    def _full_drive(self, mount: Path) -> dict[str, Any]:
        over, numbers = Run(self.name, mount), range(400)
        system = over.open()
        other = mount / "other-program"
        with other.open("wb") as file:
            # All but 128 MiB of what is free.
            os.posix_fallocate(file.fileno(), 0, free(mount) - 128 * MIB)
        yes = stored(system, over.arena, numbers)
        result: dict[str, Any] = {"stored": len(numbers), "yes": len(yes), "free_mib": free(mount) // MIB, **checked(system, over.arena, yes)}
        other.unlink()
        later = stored(system, over.arena, range(1000, 1064))
        result |= {"yes_afterwards": len(later), "afterwards": checked(system, over.arena, later)}
        system.close()
        return result

    def capacity(self) -> dict[str, Any]:
        """Three times the capacity is stored, 64 MiB a second: LMCache's eviction looks once in a second."""
        bound, numbers = 256 * MIB, range(768)
        system = self.open(bound)
        yes, most = [], 0
        begun = time.monotonic()
        for first in range(0, len(numbers), 8):
            time.sleep(max(0.0, begun + first / 64 - time.monotonic()))
            yes += stored(system, self.arena, numbers[first : first + 8])
            most = max(most, on_drive(self.folder))
        newest = checked(system, self.arena, numbers[-64:])
        there = sum(system.has(numbers))
        system.close()
        return {"stored": len(numbers), "yes": len(yes), "most_mib": most // MIB, "newest_64": newest, "there": there}


def unmount(mount: Path) -> None:
    """The kernel gives back the files of an io_uring a moment after the ring was closed: the mount is busy until then."""
    end = time.monotonic() + 60
    while (done := subprocess.run(["umount", mount], check=False, capture_output=True, text=True)).returncode != 0:
        if time.monotonic() > end:
            raise OSError(done.stderr.strip())
        time.sleep(0.2)


def free(folder: Path) -> int:
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


FAULTS = ("restart", "flipped_bit", "cut_file", "kills", "full_drive", "capacity")


def main() -> None:
    name, fault, folder = sys.argv[1:]
    # torch's own threads would not survive the forks.
    torch.set_num_threads(1)
    print(json.dumps(getattr(Run(name, Path(folder)), fault)()))


if __name__ == "__main__":
    main()
