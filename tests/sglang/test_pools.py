"""Pools whose pages go straight between drive and SGLang's memory, pools whose pages are copied, drafts: every byte compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import world
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from world import backend, config, content, fill, mamba, mha, mla, names, pages

pytestmark = pytest.mark.ci

COUNT, BIG_PAGE = 3, 64


def big(kind: str, layout: str) -> Any:
    """A pool whose regions are long enough to be moved without a copy: 64 KiB and more, in whole 4 KiB."""
    return mha(layout, heads=16, page=BIG_PAGE) if kind == "mha" else mla(layout, latent=512, rope=64, page=BIG_PAGE)


#: Without it bfloat16 KV is coded, and then it goes through staging.
UNCODED = {"codec": "none"}


def inside(over: Any) -> Any:
    """The backend itself, without what SGLang puts around it."""
    return getattr(over, "_backend", over)


def direct_bytes(over: Any) -> int:
    """Bytes that went between the drive and registered memory without a copy."""
    return inside(over)._store.stats()["direct_bytes"]


DIRECT = [("mha", x) for x in ("layer_first", "page_first", "page_first_direct", "page_head")]
DIRECT += [("mla", x) for x in ("layer_first", "page_first", "page_first_direct")]


@pytest.mark.parametrize("kind, layout", DIRECT)
def test_pages_of_large_regions_go_straight_between_the_drive_and_the_pool(cache: Path, kind: str, layout: str) -> None:
    source, target, keys = big(kind, layout), big(kind, layout), names(COUNT)
    fill(source, 1)
    fill(target, 2)
    before = [content(target, page) for page in range(5)]
    given, size = config(cache, is_mla=kind == "mla", more=UNCODED), len(content(source, 0))
    with backend(given, source) as over:
        assert min(inside(over)._kv.regions) >= 64 << 10
        assert over.batch_set_v1(keys, pages(source, 1, COUNT)) == [True] * COUNT
        assert direct_bytes(over) == COUNT * size
    with backend(given, target) as over:
        # Backwards, so that no page comes to where it was.
        indices = torch.cat([pages(target, page, 1) for page in (2, 1, 0)])
        assert over.batch_get_v1(keys, indices) == [True] * COUNT
        assert direct_bytes(over) == COUNT * size
    assert [content(target, page) for page in range(5)] == [content(source, page) for page in (3, 2, 1)] + before[3:]


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_recurrent_state_goes_straight_where_it_is_large_and_through_staging_where_it_is_not(cache: Path, layout: str) -> None:
    source, target = mamba(layout, heads=16, state=64), mamba(layout, heads=16, state=64)
    for seed, tensor in enumerate((source.temporal_buffer, *source.conv_buffer)):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
    keys, there, here = names(COUNT), [5, 2, 9], [1, 7, 4]
    with backend(config(cache, more=UNCODED), mha(), mamba=source) as over:
        regions = inside(over)._pools["mamba"].regions
        assert regions[0] >= 64 << 10 > max(regions[1:])
        assert over.batch_set_v2([transfer(PoolName.MAMBA, keys, there)]) == {PoolName.MAMBA: [True] * COUNT}
    with backend(config(cache, more=UNCODED), mha(), mamba=target) as over:
        assert over.batch_get_v2([transfer(PoolName.MAMBA, keys, here)]) == {PoolName.MAMBA: [True] * COUNT}
        assert direct_bytes(over) == COUNT * regions[0]
    assert [content(target, slot) for slot in here] == [content(source, slot) for slot in there]


@pytest.mark.parametrize("place", [0, -1])
def test_a_damaged_page_that_went_straight_into_the_pool_is_a_miss(cache: Path, place: int) -> None:
    source, target, keys = big("mha", "page_first"), big("mha", "page_first"), names(COUNT)
    fill(source, 1)
    fill(target, 2)
    with backend(config(cache, more=UNCODED), source) as over:
        assert all(over.batch_set_v1(keys, pages(source, 0, COUNT)))
    # One bit of the keys of the second page.
    page = world.raw_bytes(source.k_buffer[BIG_PAGE : 2 * BIG_PAGE])
    (file,) = [path for path in cache.rglob("data.kv") if page in path.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(page) + place % len(page)] ^= 16
    file.write_bytes(data)
    with backend(config(cache, more=UNCODED), target) as over:
        assert over.batch_get_v1(keys, pages(target, 0, COUNT)) == [True, False, True] and direct_bytes(over)
        assert over.batch_exists(keys) == 1
        # It is computed, into another slot, and stored anew.
        target.set_from_flat_data_page(4 * BIG_PAGE, source.get_data_page(BIG_PAGE))
        assert over.batch_set_v1(keys[1:2], pages(target, 4, 1)) == [True]
        assert all(over.batch_get_v1(keys, pages(target, 0, COUNT)))
    assert [content(target, at) for at in range(COUNT)] == [content(source, at) for at in range(COUNT)]


def test_pages_that_are_coded_go_through_staging_and_come_back_whole(cache: Path) -> None:
    source, target, keys = big("mha", "page_first"), big("mha", "page_first"), names(COUNT)
    # Numbers as in real KV, whose exponents are few.
    source.kv_buffer.copy_(torch.randn(source.kv_buffer.shape, generator=torch.Generator().manual_seed(1)))
    fill(target, 2)
    given = config(cache, more={"codec": "exp4"})
    with backend(given, source) as over:
        assert all(over.batch_set_v1(keys, pages(source, 1, COUNT)))
        assert inside(over)._store.stats()["live_bytes"] < 0.85 * COUNT * len(content(source, 0))
    with backend(given, target) as over:
        assert all(over.batch_get_v1(keys, pages(target, 0, COUNT))) and direct_bytes(over) == 0
    assert [content(target, at) for at in range(COUNT)] == [content(source, 1 + at) for at in range(COUNT)]


def transfer(name: PoolName, keys: list[str], indices: Any, **more: Any) -> PoolTransfer:
    return PoolTransfer(name=name, keys=keys, host_indices=torch.as_tensor(indices), **more)


def asked(over: Any, call: str, is_read: bool, keys: list[str], indices: Any) -> list[bool]:
    """Reads or stores pages: of the KV by SGLang's older call (v1), of any pool by its newer one."""
    if call == "v1":
        return (over.batch_get_v1 if is_read else over.batch_set_v1)(keys, indices)
    name = PoolName(call)
    return (over.batch_get_v2 if is_read else over.batch_set_v2)([transfer(name, keys, indices)])[name]


#: The pool, the call, and what it raises where it is asked for its regions.
COPIED = [
    ("mha", "v1", None),
    ("mla", "kv", None),
    ("mha", "kv", AttributeError),
    ("mha", "v1", NotImplementedError),
    ("mla", "v1", ValueError),
    ("mla", "kv", AssertionError),
]


@pytest.mark.parametrize("kind, call, why", COPIED)
def test_pages_of_a_pool_without_regions_are_copied_and_come_back_after_a_restart(cache: Path, kind: str, call: str, why: Any) -> None:
    def pool(seed: int) -> Any:
        made = mha() if kind == "mha" else mla()
        fill(made, seed)
        if why is not None:
            made.get_page_buffer_meta = lambda indices: (_ for _ in ()).throw(why("no regions"))
        return made

    source, target, keys = pool(1), pool(2), names(4)
    before = [content(target, page) for page in range(12)]
    # Without `interface_v1` the pages of a pool that has regions are copied too.
    given = config(cache, is_mla=kind == "mla", more={"interface_v1": int(why is not None)})
    with backend(given, source) as over:
        assert inside(over)._kv.regions == ()
        assert asked(over, call, False, keys, pages(source, 2, 4)) == [True] * 4
        # The value of a page is its own: SGLang writes over it as soon as it is stored.
        fill(source, 3)
    fill(source, 1)
    with backend(given, target) as over:
        wanted, indices = [keys[3], "f" * 64, *keys[:2]], pages(target, 5, 4)
        assert asked(over, call, True, wanted, indices) == [True, False, True, True]
        assert over.get_stats().prefetch_pgs == [3] and direct_bytes(over) == 0
    came = [content(source, page) for page in (5, 2, 3)]
    assert [content(target, page) for page in range(12)] == [*before[:5], came[0], before[6], *came[1:], *before[9:]]


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_recurrent_state_with_tensors_beside_it_is_copied_and_comes_back_after_a_restart(cache: Path, layout: str) -> None:
    def pool(seed: int) -> Any:
        # The odd size puts what comes after it at addresses of no number's alignment.
        slots = world.TOKENS // world.PAGE + 1
        made = mamba(layout, beside=(torch.zeros(slots, 5, dtype=torch.uint8), torch.zeros(slots, 3, dtype=torch.float32)))
        generator = torch.Generator().manual_seed(seed)
        for tensor in made.get_hybrid_pool_buffer():
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
        with pytest.raises(NotImplementedError):
            made.get_page_buffer_meta(torch.zeros(1, dtype=torch.int64))
        return made

    source, target, keys = pool(1), pool(2), names(3)
    before = [content(target, slot) for slot in range(12)]
    with backend(config(cache), mha(), mamba=source) as over:
        assert inside(over)._pools["mamba"].regions == ()
        assert asked(over, "mamba", False, keys, [5, 2, 9]) == [True] * 3
    with backend(config(cache), mha(), mamba=target) as over:
        assert asked(over, "mamba", True, [*keys, "f" * 64], [1, 7, 4, 8]) == [True] * 3 + [False]
    expected = dict(enumerate(before)) | {here: content(source, there) for there, here in ((5, 1), (2, 7), (9, 4))}
    assert [content(target, slot) for slot in range(12)] == list(expected.values())


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_a_drafts_pages_come_back_beside_those_of_its_model(cache: Path, kind: str, layout: str) -> None:
    def pools(seed: int) -> tuple[Any, Any]:
        kv, draft = (mha(layout) if kind == "mha" else mla(layout)), mha(layout, heads=1)
        fill(kv, seed)
        fill(draft, seed + 1)
        return kv, draft

    (kv, draft), (kv_back, draft_back), keys = pools(1), pools(3), names(4)
    before = [content(draft_back, page) for page in range(12)]
    given = config(cache, is_mla=kind == "mla")
    with backend(given, kv, draft=draft) as over:
        # In the same slots as the KV, as SGLang has them.
        assert all(over.batch_set_v1(keys, pages(kv, 2, 4))) and asked(over, "draft", False, keys, pages(draft, 2, 4)) == [True] * 4
    with backend(given, kv_back, draft=draft_back) as over:
        result = over.batch_exists_v2([*keys, "f" * 64], [transfer(PoolName.DRAFT, [*keys, "f" * 64], [])])
        assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (4, {PoolName.KV: 4, PoolName.DRAFT: 4})
        assert all(over.batch_get_v1(keys, pages(kv_back, 6, 4)))
        assert asked(over, "draft", True, [*keys, "f" * 64], pages(draft_back, 6, 5)) == [True] * 4 + [False]
    assert [content(kv_back, 6 + at) for at in range(4)] == [content(kv, 2 + at) for at in range(4)]
    assert [content(draft_back, 6 + at) for at in range(4)] == [content(draft, 2 + at) for at in range(4)]
    assert [content(draft_back, page) for page in (*range(6), 10, 11)] == [*before[:6], *before[10:]]


def test_a_second_form_of_the_kv_never_decides_where_a_prompt_is_resumed(cache: Path) -> None:
    kv, blocks, keys = mha(), mha(heads=1), names(4)
    beside = transfer(PoolName.INDEXER, keys[:2], [], hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=2, group_pages=1)
    with backend(config(cache), kv, indexer=blocks) as over:
        assert all(over.batch_set_v1(keys, pages(kv, 0, 4)))
        for _ in range(2):
            found = over.batch_exists_v2(keys, [beside])
            assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [1, 2, 3, 4])
            # It says nothing of that pool, so that SGLang loads nothing of it.
            assert found.extra_pool_hit_pages == {PoolName.KV: 4}
            assert asked(over, "indexer", False, keys[:2], pages(blocks, 0, 2)) == [True, True]
