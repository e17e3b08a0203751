"""Pages of SGLang's real host pools, through the backend that SGLang's real factory makes: every byte compared."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forebay
import pytest
import torch
import world
from forebay.sglang import identity, storage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from world import backend, config, content, fill, mha, mla, names, pages, weight_updater

pytestmark = pytest.mark.ci

MHA_LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
MLA_LAYOUTS = ["layer_first", "page_first", "page_first_direct"]
COUNT = 8


def pool_of(kind: str, layout: str) -> Any:
    return mha(layout) if kind == "mha" else mla(layout)


@pytest.mark.parametrize("kind, layout", [("mha", x) for x in MHA_LAYOUTS] + [("mla", x) for x in MLA_LAYOUTS])
def test_pages_of_every_layout_come_back_in_place_after_a_restart(cache: Path, kind: str, layout: str) -> None:
    source, target, keys = pool_of(kind, layout), pool_of(kind, layout), names(COUNT)
    fill(source, 1)
    fill(target, 2)
    given = config(cache, is_mla=kind == "mla")
    with backend(given, source) as over:
        # In place means in place: the flat form is not asked for.
        source.get_data_page = target.get_data_page = None
        assert over.batch_exists(keys) == 0
        assert over.batch_set_v1(keys, pages(source, 2, COUNT)) == [True] * COUNT
        assert over.batch_exists([*keys, "f" * 64]) == COUNT
    with backend(given, target) as over:
        # To other places than they came from, in another order.
        order = random.Random(3).sample(range(COUNT), COUNT)
        indices = torch.cat([pages(target, 3 + place, 1) for place in range(COUNT)])
        assert over.batch_get_v1([keys[at] for at in order], indices) == [True] * COUNT
    del source.get_data_page, target.get_data_page
    assert [content(target, 3 + place) for place in range(COUNT)] == [content(source, 2 + at) for at in order]
    untouched = pool_of(kind, layout)
    fill(untouched, 2)
    assert [content(target, page) for page in (0, 1, 2, 11, 12)] == [content(untouched, page) for page in (0, 1, 2, 11, 12)]


@pytest.mark.parametrize("kind, layout", [("mha", x) for x in MHA_LAYOUTS] + [("mla", x) for x in MLA_LAYOUTS])
def test_pages_come_back_where_sglang_copies_them_itself(cache: Path, kind: str, layout: str) -> None:
    source, target, keys = pool_of(kind, layout), pool_of(kind, layout), names(COUNT)
    fill(source, 1)
    given = config(cache, is_mla=kind == "mla", more={"interface_v1": 0})
    with backend(given, source) as over:
        assert over.batch_set(keys, [source.get_data_page((2 + at) * world.PAGE) for at in range(COUNT)])
        assert over.exists(keys[0]) and not over.exists("f" * 64)
        found = over.batch_get([*keys, "f" * 64], [target.get_dummy_flat_data_page() for _ in range(COUNT + 1)])
        assert found[COUNT] is None
        for at in range(COUNT):
            target.set_from_flat_data_page((4 + at) * world.PAGE, found[at])
    assert [content(target, 4 + at) for at in range(COUNT)] == [content(source, 2 + at) for at in range(COUNT)]
    # The other form orders a page's bytes differently, so it must not find these.
    with backend(config(cache, is_mla=kind == "mla"), target) as over:
        assert over.batch_exists(keys) == 0


def stored(cache: Path, given: Any, pool: Any) -> None:
    fill(pool, 1)
    with backend(given, pool) as over:
        assert all(over.batch_set_v1(names(2), pages(pool, 0, 2)))


def finds(given: Any, pool: Any) -> bool:
    with backend(given, pool) as over:
        found = over.batch_exists(names(2)) == 2
        assert over.batch_get_v1(names(2), pages(pool, 0, 2)) == [found] * 2
        return found


def test_what_gives_a_page_another_meaning_gives_it_another_key(cache: Path) -> None:
    stored(cache, config(cache), mha())
    assert finds(config(cache), mha())
    assert not finds(config(cache), mha(dtype=torch.float16)), "same size, other type"
    assert not finds(config(cache), mha("page_first_direct")), "same size, other order"
    assert not finds(config(cache), mha(heads=4))
    assert not finds(config(cache), mha(page=8))
    assert not finds(config(cache, tp=(1, 2)), mha()) and not finds(config(cache, tp=(0, 2)), mha())
    assert not finds(config(cache, pp_rank=1, pp_size=2), mha())
    assert not finds(config(cache, attn_cp_rank=1, attn_cp_size=2), mha())
    assert not finds(config(cache, more={"namespace": "b"}), mha())
    assert not finds(config(cache, more={"fingerprint": "b"}), mha())
    assert finds(config(cache, model_name="another name for the same model"), mha())


def test_other_weights_and_arguments_are_another_model(tmp_path: Path) -> None:
    def model(name: str, weights: bytes, settings: str = "{}") -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "config.json").write_text(settings)
        return str(folder)

    def of(path: str, version: str = "0.5.23", **given: Any) -> str:
        return identity.of(SimpleNamespace(model_path=path, **given), version, "one")

    one = of(model("a", b"one"))
    assert of(model("moved", b"one")) == one, "the same files in another place"
    assert of(str(tmp_path / "a"), modelopt_quant=None, model_loader_extra_config="{}") == one, "as SGLang has them by default"
    others = [
        of(model("b", b"two")),
        of(model("c", b"one", '{"rope_theta": 1}')),
        of(str(tmp_path / "a"), kv_cache_dtype="fp8_e5m2"),
        of(str(tmp_path / "a"), modelopt_quant="int4_awq"),
        of(str(tmp_path / "a"), model_loader_extra_config='{"qlora_adapter_name_or_path": "/b"}'),
        of(str(tmp_path / "a"), version="0.5.24"),
        of("org/name"),
        of("org/name", revision="1"),
        of("org/name", load_format="dummy", random_seed=1),
        of("org/name", load_format="dummy", random_seed=2),
    ]
    assert len({one, *others}) == len(others) + 1


def test_files_that_were_made_anew_in_their_place_are_other_ones(tmp_path: Path) -> None:
    place = tmp_path / "file"

    def of(contents: bytes, **given: Any) -> str:
        place.write_bytes(contents)
        return identity.of(SimpleNamespace(**({"model_path": "org/name"} | given)), "0.5.23", "one")

    for given in ({"model_path": str(place)}, {"quantization_param_path": str(place)}, {"speculative_draft_model_path": str(place)}):
        assert of(b"one", **given) == of(b"one", **given) != of(b"two", **given), given
    assert of(b"", forward_hooks=[{"name": "steer"}]) != of(b"")


def test_a_model_counts_by_where_sglang_loads_it_from(tmp_path: Path) -> None:
    # As of a model of ModelScope: the record keeps the name that the user gave.
    def of(weights: bytes, settings: str = "{}") -> str:
        (tmp_path / "model.safetensors").write_bytes(weights)
        (tmp_path / "config.json").write_text(settings)
        args = SimpleNamespace(model_path="org/name", _resolved_overrides=[("modelscope", {"model_path": str(tmp_path)})])
        return identity.of(args, "0.5.23", "")

    assert of(b"one") == of(b"one")
    assert len({of(b"one"), of(b"two"), of(b"one", '{"a": 1}')}) == 3


def test_weights_that_nobody_can_tell_apart_need_a_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    identity.of(SimpleNamespace(model_path=str(tmp_path)), "0.5.23", "")
    for given in ({"load_format": "remote_instance"}, {"weight_cache_mode": "client"}, {"model_path": "s3://bucket/model"}):
        lent = SimpleNamespace(**({"model_path": str(tmp_path)} | given))
        with pytest.raises(forebay.Unsupported, match="fingerprint"):
            identity.of(lent, "0.5.23", "")
        assert identity.of(lent, "0.5.23", "step 7") != identity.of(lent, "0.5.23", "step 8")


def test_models_of_the_hub_whose_weights_lie_in_a_download_dir_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # SGLang fetches the configuration to the hub's cache, and the weights alone to --download-dir.
    hub, fetched = tmp_path / "hub", tmp_path / "fetched"
    for folder in (hub, fetched):
        folder.mkdir()
    (hub / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda path, name, revision=None: str(hub / name))

    def of(path: str, weights: bytes | None) -> str:
        def snapshot(*_: Any, cache_dir: str, local_files_only: bool, **__: Any) -> str:
            assert cache_dir == "/models" and local_files_only
            if weights is None:
                raise FileNotFoundError("not fetched to there")
            (fetched / "model.safetensors").write_bytes(weights)
            return str(fetched)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
        return identity.of(SimpleNamespace(model_path=path, download_dir="/models"), "0.5.23", "")

    with pytest.raises(forebay.Unsupported, match="fingerprint"):
        of("org/a", None)
    assert of("org/a", b"one") == of("org/a", b"one") != of("org/a", b"two"), "updated on the hub"


def test_an_adapter_that_was_trained_anew_in_its_place_is_another_one(tmp_path: Path) -> None:
    place = str(tmp_path / "adapter")
    forms: list[Any] = [
        [SimpleNamespace(lora_id="1", lora_name="a", lora_path=place)],
        [f"a={place}"],
        [place],
        [{"lora_name": "a", "lora_path": place}],
        {"a": place},
    ]

    def of(weights: bytes, settings: str = "{}") -> str:
        Path(place).mkdir(exist_ok=True)
        (Path(place) / "adapter_model.safetensors").write_bytes(weights)
        (Path(place) / "adapter_config.json").write_text(settings)
        found = {identity.of(SimpleNamespace(model_path="org/name", lora_paths=form), "0.5.23", "one") for form in forms}
        assert len(found) == 1, "however it is given"
        return found.pop()

    def without(given: Any) -> str:
        return identity.of(SimpleNamespace(model_path="org/name", lora_paths=given), "0.5.23", "one")

    assert without(None) == without([]) == identity.of(SimpleNamespace(model_path="org/name"), "0.5.23", "one")
    assert of(b"one") == of(b"one")
    assert len({without(None), of(b"one"), of(b"two"), of(b"one", '{"lora_alpha": 1}')}) == 4


def test_an_adapter_of_the_hub_is_the_snapshot_that_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(weights: bytes) -> str:
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        return identity.of(SimpleNamespace(model_path="org/name", lora_paths=["a=org/adapter"]), "0.5.23", "one")

    (tmp_path / "adapter_config.json").write_text("{}")
    cached = lambda path, name, revision=None: str(tmp_path / name) if (path, name) == ("org/adapter", "adapter_config.json") else None  # noqa: E731
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    assert of(b"one") == of(b"one") != of(b"two")


def test_mla_pages_have_one_writer_and_are_read_by_all_ranks(cache: Path) -> None:
    source, target = mla(), mla()
    fill(source, 1)
    writer, reader = config(cache, is_mla=True, tp=(0, 2)), config(cache, is_mla=True, tp=(1, 2))
    assert writer.is_storage_writer and not reader.is_storage_writer
    with backend(writer, source) as one, backend(reader, target) as other:
        assert all(one.batch_set_v1(names(2), pages(source, 0, 2)))
        assert all(other.batch_get_v1(names(2), pages(target, 4, 2)))
    assert content(target, 5) == content(source, 1)


def test_a_draft_of_its_own_k_and_v_beside_mla_is_for_one_rank(cache: Path) -> None:
    kv, draft = mla(), mha()
    fill(draft, 1)
    transfer = [PoolTransfer(name=PoolName.DRAFT, keys=names(2), host_indices=pages(draft, 0, 2))]
    with backend(config(cache, is_mla=True), kv, draft=draft) as over:
        assert over.batch_set_v2(transfer) == over.batch_get_v2(transfer) == {PoolName.DRAFT: [True, True]}
    # SGLang's controller stores nothing of it on the other ranks, so that no prompt would ever be
    # whole there.
    for rank in range(2):
        given = config(cache, is_mla=True, tp=(rank, 2))
        sglangs = SimpleNamespace(backup_skip=not given.is_storage_writer, storage_backend_type="dynamic")
        assert HybridCacheController.should_backup(sglangs, transfer[0]) is (rank == 0)
        with pytest.raises(Exception, match="draft.*tensor-parallel"), backend(given, kv, draft=draft):
            pass


def test_latent_kv_of_one_writer_that_others_cannot_find_is_refused(cache: Path) -> None:
    for rank in range(2):
        given = config(cache, is_mla=True, tp=(rank, 2), attn_cp_rank=rank, attn_cp_size=2)
        assert given.is_storage_writer is (rank == 0), "SGLang stores nothing of the second part"
        with pytest.raises(Exception, match="context parallelism"), backend(given, mla()):
            pass
    args = SimpleNamespace(nnodes=2, tp_size=16, pp_size=1)
    with pytest.raises(forebay.Unsupported, match="several machines"):
        storage._refuse(config(cache, is_mla=True, tp=(0, 16)), args)
    storage._refuse(config(cache, is_mla=True, tp=(0, 8)), args)
    storage._refuse(config(cache, tp=(0, 16)), args)
    # With groups of attention each stores its own; SGLang has an old and a new word for them.
    for groups in ({"enable_dp_attention": True, "dp_size": 2}, {"attn_dp_size": 2}):
        storage._refuse(config(cache, is_mla=True, attn_cp_rank=0, attn_cp_size=2), SimpleNamespace(nnodes=1, tp_size=8, **groups))


def asked(name: PoolName, keys: list[str], policy: PoolHitPolicy) -> PoolTransfer:
    return PoolTransfer(name=name, keys=keys, hit_policy=policy)


def test_a_prompt_is_resumed_only_where_every_pool_has_what_it_needs(cache: Path) -> None:
    kv, swa, indexer, keys = mha(), mha(heads=1), mha(heads=4), names(COUNT)
    with backend(config(cache), kv, swa=swa, indexer=indexer) as over:
        put = lambda pool, name, at: over.batch_set_v2(  # noqa: E731
            [PoolTransfer(name=name, keys=[keys[i] for i in at], host_indices=torch.cat([pages(pool, i, 1) for i in at]))]
        )
        assert all(over.batch_set_v1(keys[:7], pages(kv, 0, 7)))
        window = [asked(PoolName.SWA, keys[:2], PoolHitPolicy.TRAILING_PAGES)]
        result = over.batch_exists_v2(keys, window)
        assert (result.kv_hit_pages, result.restorable_prefix_pages, result.extra_pool_hit_pages) == (0, [], {PoolName.KV: 7})
        put(swa, PoolName.SWA, [0, 2, 3, 5])
        result = over.batch_exists_v2(keys, window)
        # One page is all there is of a window at the start; two in a row end at 4.
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (4, [1, 4])
        put(indexer, PoolName.INDEXER, [0, 1, 2])
        both = [*window, asked(PoolName.INDEXER, keys, PoolHitPolicy.ALL_PAGES)]
        result = over.batch_exists_v2(keys, both)
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (1, [1])
        assert result.extra_pool_hit_pages == {PoolName.KV: 7, PoolName.SWA: 4, PoolName.INDEXER: 3}
        assert over.batch_exists_v2(keys, []).restorable_prefix_pages == list(range(1, 8))


def test_wrong_numbers_and_unknown_pools_are_misses(cache: Path) -> None:
    pool, keys = mha(), names(2)
    with backend(config(cache), pool) as over:
        assert over.batch_set_v1(keys, pages(pool, 0, 1)) == [False, False]
        assert over.batch_get_v1(keys, pages(pool, 0, 3)) == [False, False]
        assert over.batch_get_v2([PoolTransfer(name=PoolName.SWA, keys=keys, host_indices=pages(pool, 0, 2))]) == {
            PoolName.SWA: [False, False]
        }
        assert over.batch_set_v2([PoolTransfer(name=PoolName.KV, keys=keys)]) == {PoolName.KV: [False, False]}
        assert over.batch_exists_v2(keys, [asked(PoolName.SWA, keys, PoolHitPolicy.ALL_PAGES)]).kv_hit_pages == 0
        assert over.batch_get(["a"], [torch.zeros(4, 4).t()]) == [None]


def test_a_value_of_another_length_is_a_miss_and_its_target_is_left_alone(cache: Path) -> None:
    pool = mha()
    with backend(config(cache), pool) as over:
        inside = getattr(over, "_backend", over)
        inside._store.put([(inside._kv.key(name), bytes(100)) for name in names(2)])
        before = content(pool, 0)
        assert over.batch_exists(names(2)) == 2
        assert over.batch_get_v1(names(2), pages(pool, 0, 2)) == [False, False]
        assert content(pool, 0) == before


def test_after_close_everything_is_a_miss(cache: Path) -> None:
    pool = mha()
    with backend(config(cache), pool) as over:
        assert all(over.batch_set_v1(names(2), pages(pool, 0, 2)))
        over.close()
        assert over.batch_exists(names(2)) == 0 and over.batch_get_v1(names(2), pages(pool, 0, 2)) == [False, False]
        assert over.batch_set_v1(names(2), pages(pool, 0, 2)) == [False, False]
        assert over.batch_exists_v2(names(2)).kv_hit_pages == 0
        with pytest.raises(forebay.Closed):
            over.clear()


def test_once_the_weights_are_others_everything_is_a_miss(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updater, pool, keys = weight_updater(monkeypatch), mha(), names(3)
    transfer = [PoolTransfer(name=PoolName.SWA, keys=keys[:2], host_indices=pages(pool, 0, 2))]
    with backend(config(cache), pool, swa=pool) as over:
        assert all(over.batch_set_v1(keys[:2], pages(pool, 0, 2))) and over.batch_set_v2(transfer) == {PoolName.SWA: [True, True]}
        updater.update_weights_from_tensor()
        assert over.batch_exists(keys[:2]) == 0 and over.batch_exists_v2(keys[:2]).kv_hit_pages == 0
        assert over.batch_get_v1(keys[:2], pages(pool, 0, 2)) == [False, False]
        assert over.batch_get_v2(transfer) == {PoolName.SWA: [False, False]} == over.batch_set_v2(transfer)
        assert over.batch_set_v1(keys, pages(pool, 0, 3)) == [False] * 3
    # After a restart.
    weight_updater(monkeypatch)
    with backend(config(cache), pool, swa=pool) as over:
        assert over.batch_exists(keys) == 2 and over.batch_get_v2(transfer) == {PoolName.SWA: [True, True]}


@pytest.mark.parametrize("started", [(None,), ("dynamic", "another.module"), ("dynamic", "my.forebay"), ("dynamic", "@missing.json")])
def test_attached_later_it_is_to_be_told_what_the_weights_are_now(cache: Path, monkeypatch: pytest.MonkeyPatch, started: tuple[Any]) -> None:
    pool, keys = mha(), names(2)
    with backend(config(cache), pool) as over:
        assert all(over.batch_set_v1(keys, pages(pool, 0, 2)))
    # Started without this backend: the weights that were exchanged are not those of the namespace.
    updater = weight_updater(monkeypatch)
    start = world.server_args
    monkeypatch.setattr(world, "server_args", lambda: start(*started))
    updater.update_weights_from_tensor()
    for _ in range(2):
        for more in ({}, {"fingerprint": None}):
            with pytest.raises(Exception, match="fingerprint"), backend(config(cache, more=more), pool):
                pass
        with backend(config(cache, more={"fingerprint": "after"}), pool) as over:
            assert over.batch_exists(keys) == 0 and all(over.batch_set_v1(keys, pages(pool, 0, 2)))
            over.clear()
    # From here on it notices by itself.
    with backend(config(cache, more={"fingerprint": "after"}), pool) as over:
        updater.update_weights_from_tensor()
        assert over.batch_set_v1(keys, pages(pool, 0, 2)) == [False, False]


def test_a_server_may_be_started_with_it_by_a_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := cache.parent / "extra.json").write_text(json.dumps({"module_path": "forebay.sglang"}))
    weight_updater(monkeypatch)
    start = world.server_args
    monkeypatch.setattr(world, "server_args", lambda: start("dynamic", f"@{file}"))
    with backend(config(cache), mha()) as over:
        assert over.batch_exists(names(1)) == 0


def test_a_switch_that_sglang_takes_for_a_yes_is_refused(cache: Path) -> None:
    with pytest.raises(Exception, match="interface_v1 is 'off'.*give 1 or 0"), backend(config(cache, more={"interface_v1": "off"}), mha()):
        pass


def test_sglangs_own_keys_in_the_extra_config_are_left_to_sglang(cache: Path) -> None:
    own = {"prefetch_threshold": 64, "prefetch_timeout_base": 1, "prefetch_timeout_per_ki_token": 0.5, "hicache_storage_pass_prefix_keys": True}
    _, *taken = HybridCacheController.parse_storage_backend_extra_config(json.dumps(own))
    assert taken == list(own.values()), "SGLang has others by now"
    with backend(config(cache, more={**own, "allocator": "shm"}), mha()) as over:
        assert over.batch_exists(names(1)) == 0


def test_clear_removes_this_models_pages_only_and_stats_are_taken_once(cache: Path) -> None:
    pool = mha()
    with backend(config(cache), pool) as over, backend(config(cache, more={"fingerprint": "other"}), pool) as other:
        for one in (over, other):
            assert all(one.batch_set_v1(names(3), pages(pool, 0, 3)))
        assert over.batch_get_v1(names(2), pages(pool, 0, 2)) == [True, True]
        stats = over.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2]) and stats.backup_bandwidth[0] > 0
        assert over.get_stats().backup_pgs == []
        assert over.clear() is True
        assert (over.batch_exists(names(3)), other.batch_exists(names(3))) == (0, 3)


def test_three_threads_at_once(cache: Path) -> None:
    pool = mha()
    fill(pool, 1)
    wrong: list[str] = []

    def run(work: Any) -> None:
        try:
            for turn in range(20):
                work(turn)
        except BaseException as error:  # noqa: BLE001
            wrong.append(repr(error))

    read = threading.Event()
    with backend(config(cache), pool) as over:
        keys = [names(4, f"{turn:02x}") for turn in range(20)]

        def write(turn: int) -> None:
            assert all(over.batch_set_v1(keys[turn], pages(pool, turn % 4, 4)))

        def fetch(turn: int) -> None:
            for at, is_there in enumerate(over.batch_get_v1(keys[turn], pages(pool, 10, 4))):
                assert not is_there or content(pool, 10 + at) == content(pool, turn % 4 + at)
                if is_there:
                    read.set()

        def ask(turn: int) -> None:
            assert 0 <= over.batch_exists(keys[turn]) <= 4

        threads = [threading.Thread(target=run, args=(work,)) for work in (write, fetch, ask)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        run(fetch)
    assert not wrong and read.is_set()


def test_what_it_cannot_do_is_refused_by_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(given: Any, word: str, pool: Any = None) -> None:
        with pytest.raises(Exception, match=word), backend(given, pool or mha()):
            pass

    refused(config(cache, should_split_heads=True), "tp_lcm_size")
    refused(config(cache, more={"no_such_setting": 1}), "no_such_setting")
    refused(config(cache), "PageInterleave|_Odd", type("_Odd", (), {"page_size": 16})())
    unified = mha()
    unified.layout = "page_unified"
    refused(config(cache), "page_unified", unified)
    import sglang

    for version in ("0.5.22", "0.6.0"):
        monkeypatch.setattr(sglang, "__version__", version)
        refused(config(cache), f"SGLang {version}.*0.5.23")


def test_sglangs_own_failures_and_delays_never_give_a_wrong_byte(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.01")
    pool = mha()
    fill(pool, 1)
    with backend(config(cache), pool) as over:
        assert isinstance(over, HiCacheStorageFailureInjector)
        read = 0
        for turn in range(30):
            keys = names(4, f"{turn:02x}")
            over.batch_set_v1(keys, pages(pool, turn % 4, 4))
            for at, is_there in enumerate(over.batch_get_v1(keys, pages(pool, 10, 4))):
                read += is_there
                assert not is_there or content(pool, 10 + at) == content(pool, turn % 4 + at)
        assert read


def bytes_of_slot(pool: Any, slot: int) -> list[bytes]:
    """A slot of recurrent state, tensor by tensor."""
    return [t[slot].contiguous().view(torch.uint8).numpy().tobytes() for t in (pool.temporal_buffer, *pool.conv_buffer)]


def test_recurrent_state_comes_back_in_place_and_is_each_ranks_own(cache: Path) -> None:
    kv, source, target = mla(), world.mamba(), world.mamba()
    for seed, tensor in enumerate((source.temporal_buffer, *source.conv_buffer)):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
    source.get_data_page = target.get_data_page = None
    put = [PoolTransfer(name=PoolName.MAMBA, keys=names(3), host_indices=torch.tensor([5, 2, 9]))]
    get = [PoolTransfer(name=PoolName.MAMBA, keys=names(3), host_indices=torch.tensor([1, 7, 4]))]
    with backend(config(cache, is_mla=True, tp=(0, 2)), kv, mamba=source) as over:
        assert over.batch_set_v2(put) == {PoolName.MAMBA: [True] * 3}
    with backend(config(cache, is_mla=True, tp=(1, 2)), kv, mamba=target) as over:
        assert over.batch_get_v2(get) == {PoolName.MAMBA: [False] * 3}
    with backend(config(cache, is_mla=True, tp=(0, 2)), kv, mamba=target) as over:
        assert over.batch_get_v2(get) == {PoolName.MAMBA: [True] * 3}
    for there, here in ((5, 1), (2, 7), (9, 4)):
        assert bytes_of_slot(target, here) == bytes_of_slot(source, there)
