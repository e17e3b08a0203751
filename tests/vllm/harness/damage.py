"""What may happen to a cache on its drive: one rank's files are damaged, or some are gone."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

PAGE = 4096


def rank_folders(cache: Path, rank: int) -> list[Path]:
    """Where the KV of one of the ranks lies whose KV is in this cache; empty before anything was stored."""
    folders = sorted(cache.glob("*/pp*of*"))
    shards = sorted({folder.name for folder in folders})
    return [folder for folder in folders if folder.name == shards[rank % len(shards)]]


def _data(cache: Path, rank: int) -> list[Path]:
    return [file for folder in rank_folders(cache, rank) for file in sorted(folder.rglob("data.kv"))]


def _open_direct(file: Path) -> int:
    """Past the page cache, as the server writes: a page written both ways at once makes the kernel report an I/O error to both."""
    try:
        return os.open(file, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return os.open(file, os.O_RDWR)


def flip(cache: Path, rank: int, source: random.Random) -> int:
    """One flipped bit in half of the written pages; how many."""
    count = 0
    with mmap.mmap(-1, PAGE) as held:
        for file in _data(cache, rank):
            try:
                opened = _open_direct(file)
            except FileNotFoundError:
                # A server that runs may give an empty lane's files back meanwhile.
                continue
            for page in range(os.fstat(opened).st_size // PAGE):
                if os.preadv(opened, [held], page * PAGE) < PAGE or not any(held[:]) or source.random() < 0.5:
                    continue
                held[source.randrange(PAGE)] ^= 1 << source.randrange(8)
                os.pwritev(opened, [held], page * PAGE)
                count += 1
            os.close(opened)
    return count


def flip_last(cache: Path, rank: int) -> int:
    """One flipped bit in the last written page of each data file; how many."""
    count = 0
    with mmap.mmap(-1, PAGE) as held:
        for file in _data(cache, rank):
            opened = _open_direct(file)
            for page in reversed(range(os.fstat(opened).st_size // PAGE)):
                if os.preadv(opened, [held], page * PAGE) == PAGE and held[:] != bytes(PAGE):
                    held[0] ^= 1
                    os.pwritev(opened, [held], page * PAGE)
                    count += 1
                    break
            os.close(opened)
    return count


def truncate(cache: Path, rank: int, source: random.Random) -> int:
    """Data files that end somewhere in what was written; how many."""
    count = 0
    for file in _data(cache, rank):
        try:
            held = file.read_bytes()
        except FileNotFoundError:
            continue
        written = len(held.rstrip(b"\0")) // PAGE
        if written:
            with contextlib.suppress(FileNotFoundError):
                os.truncate(file, source.randrange(written) * PAGE)
                count += 1
    return count


def remove_data(cache: Path, rank: int, source: random.Random) -> int:
    """Data files that are gone; how many."""
    files = _data(cache, rank)
    for file in files:
        file.unlink()
    return len(files)


def remove_rank(cache: Path, rank: int, source: random.Random) -> int:
    """All of a rank is gone."""
    folders = rank_folders(cache, rank)
    for folder in folders:
        shutil.rmtree(folder)
    return len(folders)


def remove_cache(cache: Path, rank: int, source: random.Random) -> int:
    """The cache is gone."""
    shutil.rmtree(cache, ignore_errors=True)
    return 1


Damage = Callable[[Path, int, random.Random], int]
#: What may happen while no server runs.
STOPPED: tuple[Damage, ...] = (flip, flip, flip, truncate, remove_data, remove_rank, remove_cache)
#: What may happen under a running server.
RUNNING: tuple[Damage, ...] = (flip, truncate)
