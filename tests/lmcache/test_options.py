"""Every option of LMCache is decided: it is in the keys, or needs a `namespace` of its own, or cannot change a value. A new version's new
options fail here until somebody has decided. LMCache makes the keys, so most of what changes KV is out of the adapter's sight (docs/lmcache.md).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import forebay
import lmcache
import pytest
import torch
from conftest import spec
from driving import adapter, bits, key, load, memory, same, store, wait
from forebay.lmcache import plugin
from forebay.lmcache.store import MEMORY_S
from lmcache.cli.commands.server import ServerCommand
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase, get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string
from lmcache.v1.distributed.serde import get_registered_serde_types
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.token_hasher import TokenHasher

pytestmark = pytest.mark.ci

#: What docs/lmcache.md asks for: the longest that a task uses LMCache's memory, and some.
LEAST_TTL_S = 150
#: Options of `lmcache server`, of 0.5.6 and of 0.5.7rc2.
SERVER = {
    "in the keys: with another one nothing is found": "chunk_size hash_algorithm",
    "in the layout, which `plugin` tells apart where planes, layers, width or element type differ": "separate_object_groups supported_transfer_mode",
    # Blending stores, under plain keys, what it computed from KV of other contexts. The next says
    # which blocks hold no KV. The others run code of the user's.
    "needs a namespace": "engine_type null_block_id runtime_plugin_locations runtime_plugin_config server_module enable",
    "decided below, key by key": "l2_adapter",
    "with engine_type blend alone": "enable_segmented_prefix enable_dedup_content enable_blend_reorder",
    "how it is reached, and by whom": "help instance_id transport host port max_workers max_gpu_workers max_cpu_workers grpc_server_workers "
    "grpc_server_mode api_key_file isolated_ipc shm_name script_allowed_imports run_script_api_enabled http_host http_port "
    "worker_reap_timeout_seconds worker_registration_grace_seconds session_ttl_seconds",
    "what is looked for, loaded and kept, and when": "kv_load_policy kv_event_log_size p2p_advertise_url p2p_listen_url p2p_lookup_timeout "
    "p2p_load_timeout p2p_transfer_engine eviction_policy eviction_trigger_watermark eviction_ratio l2_store_policy l2_prefetch_policy "
    "l2_prefetch_max_in_flight l2_prefetch_inflight_watermark periodic_notifier_interval_ms",
    "where L1 lies": "l1_manager l1_size_gb l1_use_lazy l1_init_size_gb l1_align_bytes l1_use_hugepages l1_devdax_path l1_devdax_offset_gb "
    "l1_mlock",
    # Such values are not in host memory.
    "refused: an L2 adapter has no use with them": "gds_l1_path gds_l1_use_direct_io gds_l1_backend",
    # Then LMCache gives a task's memory to other chunks.
    "at least LEAST_TTL_S, see the docs": "l1_write_ttl_seconds l1_read_ttl_seconds",
    "reports": "disable_observability disable_metrics disable_grpc_metrics disable_logging enable_tracing enable_token_trace otlp_endpoint "
    "event_bus_queue_size prometheus_port metrics_sample_rate lookup_hash_log_dir lookup_hash_log_rotation_interval "
    "lookup_hash_log_rotation_max_size lookup_hash_log_max_files enable_gc_monitor gc_monitor_min_pause_ms gc_monitor_top_objects "
    "enable_extra_logging extra_logging_interval trace_level trace_output coordinator_url coordinator_advertise_ip "
    "coordinator_heartbeat_interval coordinator_event_reporting coordinator_event_flush_interval coordinator_event_transport "
    "coordinator_kafka_bootstrap_servers coordinator_kafka_topic coordinator_kafka_delivery_timeout coordinator_blend_timeout "
    "coordinator_blend_match_concurrency coordinator_l2_event_reporting coordinator_l2_event_flush_interval",
}
#: What the JSON of `--l2-adapter` has.
ADAPTER = {
    "needs a namespace": "serde_config",
    "ours: Forebay's settings are refused where they do not exist": "adapter_params",
    "not Forebay's, see the docs": "eviction_config max_capacity_gb",
    "which class": "module_path class_name config_class_name",
    "reports, and what other adapters do": "shared persist_config affinity_tag",
}
#: Serdes of LMCache. One with other parameters may make values of the same length.
SERDES = {"aesgcm", "fp8", "turboquant"}
#: What LMCache's connector in vLLM reads: `kv_connector_extra_config`, and what a request may say
#: of itself.
CONNECTOR = {
    # Ranks of the second server have the keys of the first one's.
    "a namespace for each server": "mp.server_urls",
    "needs a namespace": "token_drop token_drop_algorithms",
    "in the layout, which `plugin` tells apart where planes, layers, width or element type differ": "mp.mp_transfer_mode",
    "which server, and how": "mp.host mp.port mp.autostart mp.autostart.server_args mp.autostart.wait_timeout mp.mq_timeout "
    "mp.heartbeat_interval mp.nonblocking_lookup_status mp.isolated_ipc mp.use_vmm_api",
    # What decoding computes differs from a prefill's by rounding.
    "how much is stored and loaded, and when": "mp.save_decode_cache mp.eager_prefetch mp.lazy_offload mp.lazy_offload_policy "
    "mp.lazy_offload_select_count mp.lazy_offload_threshold max_offload_tokens max_tokens_per_load skip_save skip_load "
    "hint.engine_computed_tokens",
    "under names of its own": "mp.transfer_intermediate_tensors",
    "reports": "kv_events mp_server mp.hash_algorithm",
}


def _decided(table: dict[str, str]) -> set[str]:
    names = [name for group in table.values() for name in group.split()]
    assert len(names) == len(set(names)), "each is decided once"
    return set(names)


def test_every_option_of_the_server_is_decided() -> None:
    parser = argparse.ArgumentParser()
    ServerCommand().add_arguments(parser)
    options = {action.dest for action in parser._actions}
    assert len(options) > 80, "they are found"
    assert not options - _decided(SERVER), "LMCache has options of which nobody has said whether values depend on them"
    assert MEMORY_S < LEAST_TTL_S <= min(parser.get_default(lock) for lock in ("l1_write_ttl_seconds", "l1_read_ttl_seconds"))


@pytest.mark.parametrize("door", ["plugin", "native_plugin"])
def test_every_key_of_the_adapters_configuration_is_decided(door: str) -> None:
    keys = {*L2AdapterConfigBase.__annotations__, *inspect.signature(get_l2_adapter_config_class(door)).parameters}
    assert "serde_config" in keys and "adapter_params" in keys
    assert not keys - _decided(ADAPTER)
    assert set(get_registered_serde_types()) == SERDES


def test_every_option_of_the_connector_in_vllm_is_decided() -> None:
    # Read, not imported: its modules bring vLLM.
    home = Path(lmcache.__file__).parent
    sources = [path.read_text() for part in ("integration/vllm", "v1/multiprocess") for path in (home / part).rglob("*.py")]
    found = {name for source in sources for name in re.findall(r"""["']lmcache\.([a-z_.]*[a-z_])["']""", source)}
    (defaults,) = (
        node
        for node in ast.parse((home / "integration/vllm/vllm_multi_process_adapter.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "ExtraConfigDefault"
    )
    found |= {f"mp.{target.id}" for node in defaults.body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)}
    assert {"mp.server_urls", "mp.mp_transfer_mode"} <= found, "they are found"
    assert not found - _decided(CONNECTOR)


def test_the_keys_are_made_of_what_the_docs_say() -> None:
    # A new part may be the one that the docs miss: LoRA adapters, revisions, element types.
    assert [field.name for field in dataclasses.fields(ObjectKey)] == ["chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"]
    asked = {field.name for field in dataclasses.fields(IPCCacheServerKey)} - {"token_ids", "token_bytes"}
    assert asked == {"model_name", "world_size", "worker_id", "start", "end", "request_id", "cache_salt", "request_configs", "num_kv_readers"}
    assert list(inspect.signature(ObjectKey.ComputeKVRank).parameters) == ["world_size", "global_rank", "local_world_size", "local_rank"]


def test_all_that_a_key_has_names_the_value() -> None:
    plain = key(1)
    changes = {"chunk_hash": bytes(32), "model_name": "org/other", "kv_rank": 1, "object_group_id": 1, "cache_salt": "tenant"}
    assert set(changes) == {field.name for field in dataclasses.fields(ObjectKey)}
    keys = [plain, *(dataclasses.replace(plain, **{part: value}) for part, value in changes.items())]
    names = [plugin.name(one) for one in keys]
    assert len(set(names)) == len(keys)
    assert names == [_object_key_to_string(one) for one in keys], "what `native_plugin` is given"


def test_chunks_of_another_size_have_other_keys_and_versions_the_same_ones() -> None:
    tokens = list(range(8))
    four, eight = (TokenHasher(size).compute_chunk_hashes(tokens) for size in (4, 8))
    assert not set(four) & set(eight)
    assert eight[0].hex() == "74bf0cfc4ece26bc2969917f00888658f77086248591faeb900a28ded9f86a82", "of all versions and processes"


#: Layouts of the same length: what makes them differ, and shapes and element types.
LAYOUTS = {
    "one": ([(2, 4, 16, 64)], [torch.float16]),
    "KV type": ([(2, 4, 16, 64)], [torch.bfloat16]),
    "keys and values in one plane": ([(4, 16, 128)], [torch.float16]),
    "stages and not heads": ([(2, 2, 16, 128)], [torch.float16]),
    "two groups of layers": ([(2, 2, 16, 64), (2, 2, 16, 64)], [torch.float16, torch.float16]),
}
LENGTH = 2 * 4 * 16 * 64 * 2


def _desc(of: str) -> MemoryLayoutDesc:
    shapes, dtypes = LAYOUTS[of]
    return MemoryLayoutDesc([torch.Size(shape) for shape in shapes], dtypes)


def _value(of: str, fill: int) -> TensorMemoryObj:
    desc, data = _desc(of), memory(LENGTH, fill).raw_data
    metadata = MemoryObjMetadata(desc.shapes[0], desc.dtypes[0], 0, LENGTH, MemoryFormat.KV_2LTD, 1, shapes=desc.shapes, dtypes=desc.dtypes)
    return TensorMemoryObj(raw_data=data, metadata=metadata, parent_allocator=None)


def _fill(number: int, of: str) -> int:
    return 10 * number + list(LAYOUTS).index(of)


def _store(over: Any, one: int | ObjectKey, of: str) -> bool:
    made = key(one) if isinstance(one, int) else one
    value = _value(of, _fill(int.from_bytes(made.chunk_hash, "big"), of))  # Its memory is LMCache's until the answer.
    task = over.submit_store_task([made], [value])
    return wait(over.get_store_event_fd(), over.pop_completed_store_tasks)[task].is_successful()


def _finds(over: Any, number: int, of: str) -> bool:
    task = over.submit_lookup_and_lock_task([key(number)], {0: _desc(of)})
    found = bits(wait(over.get_lookup_and_lock_event_fd(), lambda: over.query_lookup_and_lock_result(task)), 1)[0]
    over.submit_unlock([key(number)])
    return found


def _loads(over: Any, number: int, of: str) -> bool:
    """Whether a load fills buffers of this layout, with what was stored with this layout."""
    target = _value(of, 99)
    answer = load(over, {number: target})[0]
    assert same(target, _value(of, _fill(number, of) if answer else 99))
    return answer


def _listed(over: Any) -> list[ObjectKey]:
    return [entry.key.to_object_key() for entry in over.list_l2_keys().entries]


@pytest.mark.parametrize("first", LAYOUTS)
def test_layouts_of_the_same_length_are_misses_for_one_another_and_lie_beside_each_other(cache: Path, first: str) -> None:
    others = [name for name in LAYOUTS if name != first]
    with adapter(spec(cache)) as over:
        assert _store(over, 1, first)
        assert [name for name in LAYOUTS if _finds(over, 1, name)] == [first] == [name for name in LAYOUTS if _loads(over, 1, name)]
    # A server of another layout comes first here, and stores what the first has not.
    with adapter(spec(cache)) as over:
        assert not any(_finds(over, 1, name) or _loads(over, 1, name) for name in others)
        assert all(_store(over, 1, name) for name in others)
    with adapter(spec(cache)) as over:
        assert all(_finds(over, 1, name) and _loads(over, 1, name) for name in LAYOUTS)


def test_nothing_but_values_is_stored_that_could_be_lost(cache: Path) -> None:
    settings = {"cache_dir": str(cache), "capacity": "1GiB", "min_free": 0}
    with adapter(spec(cache)) as over:
        assert _store(over, 1, "one")
        with forebay.ObjectStore(settings, namespace="lmcache/default") as everything:
            ((text, length),) = everything.list()
            assert length == LENGTH and everything.delete([text]) == [True]
        assert _store(over, 1, "KV type") and _finds(over, 1, "KV type")
        assert not _finds(over, 1, "one") and not _loads(over, 1, "one")


def test_a_lookup_stores_nothing(cache: Path) -> None:
    with adapter(spec(cache)) as over:
        before = over.report_status()["put"]
        assert not any(_finds(over, 1, name) for name in LAYOUTS)
        assert over.report_status()["put"] == before and _listed(over) == []


def test_what_lmcache_deletes_touches_and_lists_has_no_layout(cache: Path) -> None:
    salted = dataclasses.replace(key(2), cache_salt="0123456789abcdef")
    with adapter(spec(cache)) as over:
        assert _store(over, 1, "one") and _store(over, salted, "one") and store(over, {3: memory(LENGTH, 3)})
        assert sorted(_listed(over), key=lambda one: one.chunk_hash) == [key(1), salted, key(3)]
        over.submit_touch([key(1), salted, key(3)])
        over.delete([key(1), key(3)])
        assert _listed(over) == [salted] and not _finds(over, 1, "one")
        assert over.get_usage().total_bytes_used == LENGTH
    # Another process has not seen the layout until it lists what is there, as who deletes does
    # first.
    with adapter(spec(cache)) as over:
        over.delete([salted])
        over.delete(_listed(over))
        assert _listed(over) == []


def test_what_a_lookup_of_a_layout_has_locked_is_unlocked(cache: Path) -> None:
    with adapter(spec(cache)) as over:
        assert _store(over, 1, "one") and store(over, {2: memory(LENGTH, 2)})
        pinned: list[str] = []
        real = over._store

        class Watched:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def pin(self, names: list[str], ttl_s: float) -> list[bool]:
                answers = real.pin(names, ttl_s)
                pinned.extend(one for one, yes in zip(names, answers, strict=True) if yes)
                return answers

            def unpin(self, names: list[str]) -> None:
                for one in names:
                    if one in pinned:
                        pinned.remove(one)
                real.unpin(names)

        over._store = Watched()
        assert _finds(over, 1, "one") and _finds(over, 2, "one") and not _finds(over, 1, "KV type")
        assert pinned == []
        over._store = real


def test_behind_a_serde_values_are_bytes_and_are_found_by_the_layout_that_lmcache_makes_of_them(cache: Path) -> None:
    with adapter(spec(cache)) as over:
        assert store(over, {1: memory(5000, 1)})
    with adapter(spec(cache)) as over:
        assert _finds(over, 1, "one") and _finds(over, 1, "KV type")
        target = memory(5000, None)
        assert load(over, {1: target}) == [True] and same(target, memory(5000, 1))
        # A server without the serde that shares the namespace is told yes, and gets a miss.
        assert not _loads(over, 1, "one")
        over.delete([key(1)])
        assert not _finds(over, 1, "one")


def test_names_are_read_back_as_they_were_made() -> None:
    of = plugin.layout(*LAYOUTS["one"])
    assert len(of) == 17 and plugin.layout([torch.Size([LENGTH])], [torch.uint8]) == plugin.layout([], []) == ""
    for model, salt in [("org/model", ""), ("org/model", "tenant"), ("/a path/of/a model/", "0123456789abcdef")]:
        made = dataclasses.replace(key(1), model_name=model, cache_salt=salt)
        for suffix in ("", of):
            known = plugin.encoded((plugin.name(made) + suffix).encode())
            assert known is not None and (known[0].to_object_key(), known[1]) == (made, suffix)
