"""Prompts through SGLang's real controller and its threads: found, read, resumed, cancelled, damaged; every byte compared."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import world
from control import back_up, controller, fetch, hashes
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from world import content, fill, mha, mla, pages

PROMPT = list(range(6 * world.PAGE))


def same(one: Any, first: int, other: Any, second: int, count: int) -> bool:
    return [content(one, first + at) for at in range(count)] == [content(other, second + at) for at in range(count)]


@pytest.mark.ci
@pytest.mark.parametrize("in_place", [1, 0])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_prompt_is_found_and_read_after_a_restart(cache: Path, kind: str, in_place: int) -> None:
    make, is_mla, more = (mha, False, {"interface_v1": in_place}) if kind == "mha" else (mla, True, {"interface_v1": in_place})
    source, target = make(), make()
    fill(source, 1)
    with controller(cache, source, is_mla=is_mla, more=more) as control:
        assert fetch(control, PROMPT, pages(source, 8, 6))[:2] == (0, 0)
        assert back_up(control, PROMPT, pages(source, 1, 6)) == len(PROMPT)
    with controller(cache, target, is_mla=is_mla, more=more) as control:
        longer = [*PROMPT, *range(900, 900 + world.PAGE)]
        assert fetch(control, longer, pages(target, 3, 7))[:2] == (len(PROMPT), len(PROMPT))
        assert fetch(control, [1, *PROMPT], pages(target, 12, 3))[0] == 0
    assert same(source, 1, target, 3, 6)


def window(pool: Any, first: int, count: int) -> list[PoolTransfer]:
    return [
        PoolTransfer(
            name=PoolName.SWA,
            host_indices=pages(pool, first, count),
            keys=hashes(PROMPT)[-count:],
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )
    ]


@pytest.mark.ci
def test_a_window_beside_the_kv_comes_back_with_it(cache: Path) -> None:
    kv, swa, kv_back, swa_back = mha(), mha(heads=1), mha(), mha(heads=1)
    fill(kv, 1)
    fill(swa, 2)
    with controller(cache, kv, swa=swa) as control:
        assert back_up(control, PROMPT, pages(kv, 0, 6), window(swa, 4, 2)) == len(PROMPT)
    with controller(cache, kv_back, swa=swa_back) as control:
        found, read, pools = fetch(control, PROMPT, pages(kv_back, 5, 6), window(swa_back, 9, 2))
        assert (found, read, pools[PoolName.SWA]) == (len(PROMPT), len(PROMPT), 2)
    assert same(kv, 0, kv_back, 5, 6) and same(swa, 4, swa_back, 9, 2)


@pytest.mark.ci
def test_a_cancelled_request_reads_nothing(cache: Path) -> None:
    kv, target = mha(), mha()
    fill(kv, 1)
    with controller(cache, kv) as control:
        back_up(control, PROMPT, pages(kv, 0, 6))
    fill(target, 2)
    before = [content(target, page) for page in range(16)]
    with controller(cache, target) as control:
        assert fetch(control, PROMPT, pages(target, 0, 6), stop=True)[:2] == (len(PROMPT), 0)
    assert [content(target, page) for page in range(16)] == before


def flip_bits(cache: Path, number: int, seed: int) -> None:
    """Turns bits of what was written, anywhere in the files that hold it."""
    source = random.Random(seed)
    files = [path for path in cache.rglob("data.kv") if path.stat().st_size]
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        written = [at for at in source.sample(range(len(data)), min(len(data), 40_000)) if data[at]]
        for at in written[:number]:
            data[at] ^= 1 << source.randrange(8)
        path.write_bytes(data)


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(4))
def test_damaged_pages_are_computed_and_never_read_wrong(cache: Path, seed: int) -> None:
    kv, target = mha(), mha()
    fill(kv, 1)
    with controller(cache, kv) as control:
        back_up(control, PROMPT, pages(kv, 0, 6))
    flip_bits(cache, 2, seed)
    with controller(cache, target) as control:
        found, read, _ = fetch(control, PROMPT, pages(target, 0, 6))
        assert read < len(PROMPT) and same(kv, 0, target, 0, read // world.PAGE)
        # What was found to be damaged is not offered again, and is stored anew.
        assert fetch(control, PROMPT, pages(target, 0, 6))[0] == read
        assert back_up(control, PROMPT, pages(target, 8, 6)) == len(PROMPT)


def test_a_server_that_was_killed_loses_no_page_that_was_committed(cache: Path) -> None:
    kv = mha()
    with subprocess.Popen([sys.executable, __file__, str(cache)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and "stored" in child.stdout.read()
        assert child.wait(120) == -signal.SIGKILL
    with controller(cache, kv) as control:
        assert fetch(control, PROMPT, pages(kv, 0, 6))[:2] == (len(PROMPT), len(PROMPT))
    expected = mha()
    fill(expected, 1)
    assert same(expected, 0, kv, 0, 6)


def stored_and_killed(cache: Path) -> None:
    """Stores a prompt, waits until it is durable and dies."""
    kv = mha()
    fill(kv, 1)
    with controller(cache, kv) as control:
        assert back_up(control, PROMPT, pages(kv, 0, 6)) == len(PROMPT)
        control.storage_backend._store.flush()
        print("stored", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def rank(cache: str, number: int, store: int) -> None:
    """One of two tensor-parallel ranks, which agree over gloo."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{cache}-{store}", rank=number, world_size=2)
    kv = mha()
    expected = mha()
    fill(expected, 10 + number)
    with controller(Path(cache), kv, group=torch.distributed.group.WORLD, rank=number, size=2) as control:
        if store:
            kv.kv_buffer.copy_(expected.kv_buffer)
            count = 6 if number == 0 else 4
            assert back_up(control, PROMPT[: count * world.PAGE], pages(kv, 0, count)) == count * world.PAGE
        else:
            # Rank 1 has four pages only, so both say four.
            assert fetch(control, PROMPT, pages(kv, 0, 6))[:2] == (4 * world.PAGE, 4 * world.PAGE)
            assert same(expected, 0, kv, 0, 4)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_ranks_agree_and_each_reads_its_own(cache: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    for store in (1, 0):
        ranks = [context.Process(target=rank, args=(str(cache), number, store)) for number in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(240)
            process.kill()
        assert [process.exitcode for process in ranks] == [0, 0]


if __name__ == "__main__":
    stored_and_killed(Path(sys.argv[1]))
