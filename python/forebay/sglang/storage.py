"""SGLang's HiCache over Forebay: what falls out of host memory is kept on local NVMe, and comes back from there.

SGLang makes one `HiCache` per scheduler process and calls it from three threads: one asks what is there, one reads, one writes. Every
call waits for its own batch; the store runs the batches side by side.

Invariants:
- A page that is answered with yes is in host memory with every byte verified. Anything else, a page of another length among it, is a
  no: SGLang computes it.
- Nothing is raised into SGLang once it runs, except by `clear`. What is wrong with the settings, the pools or the version is raised at the
  start.
- When `close` returns, no byte of SGLang's memory is read or written any more, unless the drive hangs: then its pools stay alive.
- A key names a page's content with all that gives it its meaning, so nothing is ever overwritten.
- Once SGLang has exchanged its weights nothing is found, read or stored (`weights.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import forebay
import torch
from forebay.sglang import identity, versions, weights
from forebay.sglang.pages import Pages, span_of
from forebay.sglang.quiet import Guard
from forebay.sglang.resume import window_ends
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

logger = logging.getLogger("sglang.forebay")

#: How long `close` waits for batches under way.
CLOSE_TIMEOUT_MS = 30_000


class HiCache(HiCacheStorage):
    """A storage backend of SGLang's (`--hicache-storage-backend dynamic`, docs/sglang.md).

    In SGLang's extra config, `namespace` separates servers that must not see each other's pages, and `fingerprint` adds to what tells
    models apart; all other keys but SGLang's own are Forebay's settings (docs/configuration.md).
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        """Opens the cache."""
        version = versions.require("--hicache-storage-backend")
        from sglang.srt.runtime_context import get_server_args

        # What SGLang was started with, also where a backend is attached later.
        server_args = get_server_args()
        _refuse(storage_config, server_args)
        weights.watch(is_start=_was_started_with_it(server_args))
        # A key without a value is not given: the text "None" would pass for a fingerprint.
        settings = {k: v for k, v in (storage_config.extra_config or {}).items() if v is not None and k not in versions.SGLANGS_KEYS}
        space, addition = str(settings.pop("namespace", "default")), str(settings.pop("fingerprint", ""))
        if weights.may_have_missed() and not addition:
            raise forebay.Unsupported(
                "SGLang was started without this storage backend, and does not tell whether it has exchanged its weights since; give "
                "`fingerprint` in the extra config, a name for the weights that it has now, or start SGLang with "
                "--hicache-storage-backend dynamic"
            )
        model = identity.of(server_args, version, addition)
        self._in_place = _is_in_place(storage_config)
        self._config = storage_config
        self._store = forebay.ObjectStore(settings or None, namespace=f"sglang/{space}/{model}")
        self._quiet = Guard(logger)
        self._kv: Pages | None = None
        self._pools: dict[str, Pages] = {}
        self._moved = _Moved(storage_config.enable_storage_metrics)
        logger.info("Forebay keeps this server's pages in namespace sglang/%s/%s", space, model)

    # Pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of the KV itself."""
        super().register_mem_pool_host(mem_pool_host)
        self._kv = Pages.of(str(PoolName.KV), mem_pool_host, self._config, self._in_place)
        self._declare(self._kv)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """A pool beside the KV: windows, state, indexers, drafts."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name != str(PoolName.KV):
            try:
                self._pools[name] = Pages.of(name, host_pool, self._config, in_place=True)
            except forebay.Unsupported:
                # Where it is attached later, SGLang goes on without this pool, and what it stores
                # would never be found.
                self.close()
                raise
            self._declare(self._pools[name])

    # Questions.

    def exists(self, key: str) -> bool:
        """Whether a page of the KV is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages of the KV are stored, from the first on."""
        return self._quiet.guarded("asked", lambda: self._count(self._need_kv(), keys), 0)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """At which of the pages a prompt can be resumed, with all that the pools beside the KV must have there."""
        return self._quiet.guarded("asked", lambda: self._restorable(keys, pool_transfers or []), PoolTransferResult.empty())

    # Pages in SGLang's memory.

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fills pages of the KV."""
        return self._quiet.guarded("read", lambda: self._read(self._need_kv(), keys, host_indices), [False] * len(keys))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Stores pages of the KV. A page that is stored already is a yes, and is not written again."""
        return self._quiet.guarded("stored", lambda: self._write(self._need_kv(), keys, host_indices), [False] * len(keys))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Fills pages of the pools beside the KV."""
        return self._of_pools("read", transfers, self._read)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Stores pages of the pools beside the KV."""
        return self._of_pools("stored", transfers, self._write)

    # Pages in tensors of their own, where SGLang copies them (without `interface_v1`).

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Fills a tensor with a page of the KV."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        """Fills tensors with pages of the KV; None for a page that is not there."""

        def read() -> list[torch.Tensor | None]:
            pages = self._need_kv()
            targets = [_whole(target) for target in target_locations]
            found = self._store.get([(pages.key(key), span_of(target)) for key, target in zip(keys, targets, strict=True)])
            return [target if is_there else None for target, is_there in zip(targets, found)]

        return self._quiet.guarded("read", read, [None] * len(keys))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores a tensor as a page of the KV."""
        return self.batch_set([key], [value])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Stores tensors as pages of the KV."""

        def write() -> bool:
            pages, flat = self._need_kv(), [value.contiguous() for value in values]
            items = [(pages.key(key), span_of(value)) for key, value in zip(keys, flat, strict=True)]
            return all(self._store.put(items, dtype=pages.dtype))

        return self._quiet.guarded("stored", write, False)

    # The rest.

    def clear(self) -> bool:
        """Removes every page of this model, for all servers that use this namespace. Raises where it cannot: SGLang catches that, and takes
        anything else for success."""
        self._store.clear()
        return True

    def close(self) -> None:
        """Waits for batches under way, makes stored pages durable, closes."""
        self._quiet.guarded("closed", lambda: self._store.close(CLOSE_TIMEOUT_MS), None)

    def get_stats(self) -> Any:
        """Pages and throughput since the last call, for SGLang's own metrics; None where they are off."""
        return self._moved.take()

    # Helpers.

    def _declare(self, pages: Pages) -> None:
        """Lets the drives read straight into the pool, where it is aligned; without that they read through staging."""
        for buffer in pages.memories():
            try:
                self._store.register_memory(buffer)
            except forebay.ForebayError as error:
                logger.info("pages are copied through staging, their memory could not be registered: %s", error)

    def _need_kv(self) -> Pages:
        weights.require_the_same()
        if self._kv is None:
            raise ValueError("SGLang has registered no host pool")
        return self._kv

    def _restorable(self, keys: list[str], transfers: list[PoolTransfer]) -> PoolTransferResult:
        kv = self._need_kv()
        pages = len(keys) if kv.is_logical else self._count(kv, keys)
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        left = range(1, pages + 1)
        for transfer in transfers:
            # BLOCK_GROUPS does not decide where a prompt can be resumed, and SGLang 0.5.23 does not
            # ask for it. A pool without an entry in `hits` has no pages.
            if not left or transfer.name == PoolName.KV or transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue
            pool = self._pools[str(transfer.name)]
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                good = list(range(1, self._count(pool, keys[:pages]) + 1))
            else:
                there = self._store.exists([pool.key(key) for key in keys[:pages]])
                good = window_ends(there, max(1, len(transfer.keys or ())))
            if good:
                hits[transfer.name] = good[-1]
            kept = set(good)
            left = [end for end in left if end in kept]
        return PoolTransferResult(left[-1] if left else 0, hits, list(left))

    def _count(self, pages: Pages, keys: Sequence[str]) -> int:
        if pages.is_logical:
            return len(keys)
        return self._store.count_prefix([pages.key(key) for key in keys])

    def _of_pools(
        self, what: str, transfers: Iterable[PoolTransfer], do: Callable[[Pages, list[str], torch.Tensor], list[bool]]
    ) -> dict[str, list[bool]]:
        def one(transfer: PoolTransfer) -> list[bool]:
            weights.require_the_same()
            name, keys = str(transfer.name), list(transfer.keys or ())
            pages = self._need_kv() if name == str(PoolName.KV) else self._pools[name]
            if transfer.host_indices is None:
                raise ValueError(f"pool {name}: no indices for {len(keys)} pages")
            return do(pages, keys, transfer.host_indices)

        none = {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}
        return {t.name: self._quiet.guarded(what, lambda t=t: one(t), none[t.name]) for t in transfers}

    def _read(self, pages: Pages, keys: list[str], indices: torch.Tensor) -> list[bool]:
        if self._has_no_bytes(pages, keys, indices):
            return [True] * len(keys)
        began = time.monotonic()
        names = [pages.key(key) for key in keys]
        if pages.regions:
            found = self._store.get(list(zip(names, pages.spans(len(keys), indices))))
        else:
            flat = [pages.pool.get_dummy_flat_data_page() for _ in keys]
            found = self._store.get([(name, span_of(page)) for name, page in zip(names, flat)])
            for at, (page, is_there) in enumerate(zip(flat, found)):
                if is_there:
                    pages.pool.set_from_flat_data_page(int(indices[at * pages.page_size]), page)
        self._moved.note(True, found, pages, time.monotonic() - began)
        return found

    def _write(self, pages: Pages, keys: list[str], indices: torch.Tensor) -> list[bool]:
        if self._has_no_bytes(pages, keys, indices):
            return [True] * len(keys)
        began = time.monotonic()
        names = [pages.key(key) for key in keys]
        if pages.regions:
            values: list[Any] = list(pages.spans(len(keys), indices))
            done = self._store.put(list(zip(names, values)), dtype=pages.dtype)
        else:
            first = range(0, len(keys) * pages.page_size, pages.page_size)
            # Held until the put is over.
            flat = [pages.pool.get_data_page(int(indices[at])).contiguous() for at in first]
            done = self._store.put([(name, span_of(page)) for name, page in zip(names, flat)], dtype=pages.dtype)
        self._moved.note(False, done, pages, time.monotonic() - began)
        return done

    @staticmethod
    def _has_no_bytes(pages: Pages, keys: Sequence[str], indices: torch.Tensor) -> bool:
        if indices.numel() != len(keys) * pages.page_size:
            raise ValueError(f"{indices.numel()} indices for {len(keys)} pages of {pages.page_size}")
        return pages.is_logical or not keys


class _Moved:
    """What was read and stored since SGLang last asked."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._lock = threading.Lock()
        self._new()

    def _new(self) -> None:
        from sglang.srt.observability.metrics_collector import StorageMetrics

        self._metrics = StorageMetrics()

    def note(self, is_read: bool, answers: Sequence[bool], pages: Pages, seconds: float) -> None:
        """One batch; throughput is in GB/s, as SGLang's own backends give it."""
        moved = sum(answers)
        if not self._is_on or not moved:
            return
        page = sum(pages.regions) or pages.page_size * int(getattr(pages.pool, "size_per_token", 0))
        speed = moved * page / max(seconds, 1e-9) / 1e9
        with self._lock:
            (self._metrics.prefetch_pgs if is_read else self._metrics.backup_pgs).append(moved)
            (self._metrics.prefetch_bandwidth if is_read else self._metrics.backup_bandwidth).append(speed)

    def take(self) -> Any:
        """All of it, once."""
        if not self._is_on:
            return None
        with self._lock:
            taken = self._metrics
            self._new()
        return taken


def _is_in_place(config: HiCacheStorageConfig) -> bool:
    """`interface_v1` of the extra config. SGLang takes any text for a yes, "off" too."""
    given = (config.extra_config or {}).get("interface_v1") or 0
    if given not in (0, 1):
        raise forebay.ConfigError(f"interface_v1 is {given!r} in the extra config: give 1 or 0, as a number")
    return bool(given)


def _was_started_with_it(server_args: Any) -> bool:
    """Whether this is the backend that SGLang was started with. What its record does not tell for sure counts as attached later."""
    if server_args.hicache_storage_backend != "dynamic":
        return False
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    given = getattr(server_args, "hicache_storage_backend_extra_config", None)
    try:
        # SGLang's own reading: the extra config may be in a file.
        config, *_ = HybridCacheController.parse_storage_backend_extra_config(given)
    except Exception:  # noqa: BLE001 - whatever a file that changed since, or is gone, makes of it
        return False
    return isinstance(config, dict) and str(config.get("module_path", "")).split(".")[0] == "forebay"


def _refuse(config: HiCacheStorageConfig, server_args: Any) -> None:
    """What would give wrong or useless answers is refused at the start."""
    if config.should_split_heads:
        raise forebay.Unsupported(
            "tp_lcm_size with --hicache-mem-layout page_head: SGLang splits a page's heads for servers of another tensor-parallel size, "
            "which Forebay does not do; leave tp_lcm_size out of the extra config"
        )
    if config.dcp_size > 1:
        raise forebay.Unsupported("decode context parallelism: SGLang offers it to its own backends only; start without it")
    if not config.is_mla_model:
        return
    # One rank stores what all of them hold, and a prompt is found where all of them find it.
    machines = getattr(server_args, "nnodes", None) or 1
    ranks = (getattr(server_args, "tp_size", None) or 1) * (getattr(server_args, "pp_size", None) or 1)
    if machines > 1 and config.tp_size > ranks // machines:
        raise forebay.Unsupported(
            "HiCache for a model with latent KV (MLA) whose tensor-parallel ranks are on several machines: SGLang stores from the first rank "
            "alone, and the others find nothing on their own drives; use one server for each machine, or --attn-dp-size with as many groups "
            "as machines"
        )
    of_dp = (identity.resolved(server_args, "dp_size") or 1) if identity.resolved(server_args, "enable_dp_attention") else 1
    has_groups = max(of_dp, identity.resolved(server_args, "attn_dp_size") or 1) > 1
    if config.attn_cp_size > 1 and not has_groups:
        raise forebay.Unsupported(
            "HiCache for a model with latent KV (MLA) and prefill context parallelism: SGLang stores the part of the first rank alone, and no "
            "prompt would be found; start SGLang without it, or without Forebay"
        )


def _whole(target: torch.Tensor) -> torch.Tensor:
    if not target.is_contiguous():
        raise ValueError("a page's target is not contiguous")
    return target
