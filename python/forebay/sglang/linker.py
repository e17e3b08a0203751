"""SGLang's external linker over Forebay: KV goes from local NVMe straight into SGLang's device pools, layer by layer.

SGLang's tree asks which prefix lengths can be restored (`lookup`), queues a load into slots of the request's own (`load`), starts all
that is queued with the next batch, and its forward pass waits for each layer. **SGLang cannot compute a load anew that has begun**: one
that fails costs the requests of its batch an error (503). So what can be known is known before: `load` refuses, and SGLang computes.

Invariants:
- A batch is good only if every byte of every layer was verified. A layer is let go when all layers up to it are in place, or when the
  batch has failed; then its requests end with an error, and none with a wrong answer.
- What a lookup promised is kept from eviction until its load has ended, for as long as `load_timeout_ms` says and the share of the
  capacity for it (`lease_share`) allows.
- All ranks refuse a load, or none: they agree on it. Whether an offload is taken depends on its transfers alone.
- A load ends when `load_timeout_ms` is over, whatever the drive does. What a device still does to SGLang's slots is waited for, and the
  log says so: SGLang would use them for other KV. Only `close` leaves it alone after a while; the pools stay alive then.
- When `finish_layer_wise_loading` returns, no byte of that batch's slots is written any more.
- Nothing is raised into SGLang once it runs. What is wrong with settings, pools or version is raised at the start.
- Once SGLang has exchanged its weights nothing is promised, loaded or stored (`weights.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import forebay
import torch
from forebay.connector import settings as checked
from forebay.sglang import identity, versions, weights
from forebay.sglang.quiet import Guard
from forebay.sglang.resume import window_ends
from forebay.sglang.sources import Source, sources
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

logger = logging.getLogger("sglang.forebay")

#: The default here: a load that is late ends its requests, so it gets more time than one that is
#: merely computed.
LOAD_TIMEOUT_MS = 30_000
#: Requests whose promises are kept at once. SGLang does not say when a request that waited has
#: gone.
MOST_PROMISES = 1024
#: For so long after a failed load, unless it only met damaged pages, nothing is promised: the next
#: load would probably fail too.
PAUSE_S = 30.0
#: Causes of missing pages that do not speak against the drive: they are computed and stored anew.
DAMAGE = {"not_found", "corrupt", "short_io", "prefix"}
#: How long `close` waits for each thread and each engine; after so long the log also names what other
#: calls wait for.
CLOSE_TIMEOUT_MS = 30_000


class Missed(Exception):
    """A load did not bring what was promised."""

    def __init__(self, part: Part, pages: int, causes: dict[str, int]) -> None:
        """`causes` say how many pages are missing why."""
        super().__init__(f"pool {part.source.name}: {pages} of {len(part.keys)} pages came, {causes}")
        self.is_damage_only = set(causes) <= DAMAGE


@dataclass
class Part:
    """The pages of one source that a request loads."""

    source: Source
    keys: list[str]
    indices: torch.Tensor
    pins: Any = None


@dataclass
class Batch:
    """Loads that SGLang starts together."""

    index: int
    parts: list[Part]
    events: list[Any]
    until: float
    """When its time is over, on the monotonic clock, also where it waits for other batches first."""
    ended: threading.Event = field(default_factory=threading.Event)
    is_good: bool = False


@dataclass
class Offload:
    """One of the tree's nodes on its way to the drive."""

    stores: list[tuple[Any, int]] = field(default_factory=list)
    """The engines' handles, each with the number of its pages."""
    is_begun: bool = False
    is_failed: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the slots may be used for other KV."""
        return self.is_begun and all(store.done for store, _ in self.stores)

    @property
    def is_stored(self) -> bool:
        """Whether all of it is there."""
        ended = [(store.wait(), pages) for store, pages in self.stores]
        return not self.is_failed and all(result.stored + result.already_there == pages for result, pages in ended)


class Linker(UnifiedCacheLinker):
    """A linker for `--unified-cache-external-linker-backend dynamic` (docs/sglang.md).

    In SGLang's extra config, `namespace` separates servers that must not see each other's pages, and `fingerprint` adds to what tells
    models apart; all other keys are Forebay's settings (docs/configuration.md).
    """

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any = None, forward_stream: Any = None
    ) -> None:
        """Opens a cache for each kind of page that the model has."""
        version = versions.require("--enable-unified-cache-external-linker")
        _refuse(server_args, params)
        weights.watch(is_start=True)
        # A key without a value is not given: the text "None" would pass for a fingerprint.
        settings = {"load_timeout_ms": LOAD_TIMEOUT_MS, **{k: v for k, v in (extra_config or {}).items() if v is not None}}
        space, addition = str(settings.pop("namespace", "default")), str(settings.pop("fingerprint", ""))
        if "chunk_size" in settings:
            raise forebay.ConfigError("chunk_size: a chunk is a page of SGLang's; leave it out, and set SGLang's --page-size")
        self.forward_stream = forward_stream
        resolved = checked(settings, name="linker_extra_config")
        if resolved["mode"] == "ro":
            raise forebay.Unsupported(
                "mode: ro with the external linker: a damaged page stays, so every request that needs it would end with an error; set "
                "mode: rw, or use HiCache (docs/sglang.md)"
            )
        if resolved["remote_url"] is not None:
            # Otherwise chunks would be uploaded for nobody.
            logger.warning("remote_url: the external linker fetches nothing from a remote store, so it uploads nothing; leave it out")
            # Not `None`: a file or the environment would give it again.
            settings["remote_url"] = "none"
        self._timeout_ms = int(resolved["load_timeout_ms"])
        # As for other servers, 0 loads nothing.
        self._is_loading = self._timeout_ms > 0
        self._group = resolve_hybrid_device_pool_group(
            kvcache=params.token_to_kv_pool_allocator.get_kvcache(),
            page_size=params.page_size,
            params=params,
            components=components,
        )
        self._peers = _peers(params)
        rank, size = _rank(params)
        alike = self._group.rank_replicated
        self._is_writer = not alike or rank == 0
        model = identity.of(server_args, version, addition)
        self._sources = sources(
            self._group,
            settings,
            model=f"sglang/{space}/{model}",
            tp=(0, 1) if alike else (rank, size),
            cp=(params.attn_cp_rank, params.attn_cp_size),
        )
        self.pools = self._group.entry_map
        self.layer_done_counter = LayerWiseLoadCounter(self._group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._quiet = Guard(logger)
        self._promises: OrderedDict[str, tuple[float, list[Any]]] = OrderedDict()
        self._pending: dict[str, list[Part]] = {}
        self._batches: dict[int, Batch] = {}
        self._offloads: deque[Offload] = deque()
        self._nothing_until = 0.0
        device = next(iter(self.pools.values())).kv_buffer[0].device
        self._order = _Order(device, forward_stream)
        self._loader = _Worker("forebay-load", self._load_batch)
        self._saver = _Worker("forebay-offload", self._save)
        logger.info("Forebay keeps this server's pages in namespaces sglang/%s/%s/*", space, model)

    # Questions.

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Every prefix length, in pages, at which this rank can resume; the longest is kept for a while."""
        return self._quiet.guarded("asked", lambda: self._restorable(rid, transfers), [])

    def _restorable(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        weights.require_the_same()
        now = time.monotonic()
        while self._promises and (len(self._promises) >= MOST_PROMISES or next(iter(self._promises.values()))[0] <= now):
            self._promises.popitem(last=False)
        self._promises.pop(rid, None)
        given = {transfer.name: list(transfer.keys or ()) for transfer in transfers}
        keys = given.get(PoolName.KV, [])
        if not self._is_loading or not keys or now < self._nothing_until or not set(self._sources) <= set(given):
            return []
        pages, pins = self._sources[PoolName.KV].find(keys, self._timeout_ms)
        ends, kept = list(range(1, pages + 1)), [pins]
        windows = {name: max(1, len(given[name])) for name in self._sources if name != PoolName.KV}
        for name, window in windows.items():
            good = set(window_ends(self._sources[name].there(keys[:pages]), window))
            ends = [end for end in ends if end in good]
        if ends:
            end = ends[-1]
            kept += [self._sources[name].find(keys[max(0, end - w) : end], self._timeout_ms)[1] for name, w in windows.items()]
            self._promises[rid] = (now + self._timeout_ms / 1000, kept)
        return ends

    # Loads.

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queues a load of what a lookup has promised, if it is still there on every rank."""
        given = [transfer for transfer in transfers if transfer.keys]
        if not given or rid in self._pending:
            # This is alike on all ranks, so they need not agree on it.
            return False
        parts = self._quiet.guarded("promised", lambda: self._promised(given), None)
        self._promises.pop(rid, None)
        if not self._agreed(parts is not None):
            return False
        assert parts is not None
        self._pending[rid] = parts
        return True

    def _promised(self, transfers: list[PoolTransfer]) -> list[Part] | None:
        """What is to be loaded, kept from eviction; none where some of it has gone."""
        weights.require_the_same()
        if time.monotonic() < self._nothing_until:
            return None
        parts = []
        for transfer in transfers:
            source, keys = self._sources[transfer.name], list(transfer.keys or ())
            if transfer.device_indices is None or transfer.device_indices.numel() != len(keys) * source.page_size:
                raise ValueError(f"pool {transfer.name}: the indices are not those of {len(keys)} pages")
            pages, pins = source.find(keys, self._timeout_ms)
            # What could be evicted before the load begins would end the request.
            if pages < len(keys) or pins.pinned_chunks < pages:
                return None
            parts.append(Part(source, keys, transfer.device_indices, pins))
        return parts

    def _agreed(self, mine: bool) -> bool:
        answer = torch.tensor([int(mine)], dtype=torch.int)
        for group in self._peers:
            torch.distributed.all_reduce(answer, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(answer.item())

    def cancel_queued_load(self, rid: str) -> bool:
        """Drops a load that has not begun."""
        return self._pending.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Begins all queued loads; the number under which the model waits for their layers."""
        if not self._pending:
            return -1
        parts = [part for request in self._pending.values() for part in request]
        self._pending = {}
        until = time.monotonic() + self._timeout_ms / 1000
        batch = Batch(self.layer_done_counter.update_producer(), parts, self._order.now(), until)
        self._batches[batch.index] = batch
        self._loader.give(batch)
        return batch.index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Waits until nothing of a batch moves any more; whether all of it is in place."""
        batch = self._batches.pop(counter_index, None)
        if batch is None:
            return True
        has_landed = self.layer_done_counter.finish(counter_index)
        _wait_for("a load", batch.ended.wait)
        return has_landed and batch.is_good

    def _load_batch(self, batch: Batch) -> None:
        loads: list[tuple[Any, Part]] = []
        try:
            self._begin(batch, loads)
            for layer in range(self._group.num_layers):
                for load, part in loads:
                    at = part.source.last.get(layer)
                    if at is not None:
                        self._expect(load.wait_layer(at).tokens, load, part)
                self._order.landed()
                self.layer_done_counter.complete(batch.index, layer)
            for load, part in loads:
                self._expect(load.wait().tokens, load, part)
            batch.is_good = True
        except BaseException as error:  # noqa: BLE001  (the forward pass waits for these layers)
            self._note_failure(error)
            self.layer_done_counter.fail(batch.index, error)
            for load, _ in loads:
                load.cancel()
        finally:
            for part in batch.parts:
                part.pins = None
            batch.ended.set()

    def _begin(self, batch: Batch, loads: list[tuple[Any, Part]]) -> None:
        stream = self._order.after(batch.events)
        for part in batch.parts:
            slots = part.source.slots(self._order.host(part.indices, batch.events), len(part.keys))
            # With no time left it fails at once.
            left_ms = max(0, int((batch.until - time.monotonic()) * 1000))
            load = part.source.engine.load(
                part.source.prompt(part.keys), part.source.kv, slots, stream=stream, timeout_ms=left_ms, by_layer=True
            )
            loads.append((load, part))

    def _expect(self, tokens: int, load: Any, part: Part) -> None:
        asked = len(part.keys) * part.source.page_size
        if tokens < asked:
            # Not cancelled: all of the damage before this page is found now, so that a request that
            # comes again is answered.
            raise Missed(part, tokens // part.source.page_size, load.wait().misses)

    def _note_failure(self, error: BaseException) -> None:
        if not isinstance(error, Missed) or not error.is_damage_only:
            self._nothing_until = time.monotonic() + PAUSE_S
        self._quiet.warn("load", "a load failed, SGLang ends its requests: %s", error)

    # Offloads.

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Queues a node to be stored. Taken on all ranks, or on none; only writers store it."""
        given = [transfer for transfer in transfers if transfer.keys and transfer.device_indices is not None]
        if not given:
            return False
        offload = Offload()
        self._offloads.append(offload)
        if self._is_writer:
            self._saver.give((offload, given, self._order.now()))
        else:
            offload.is_begun = True
        return True

    def _save(self, task: tuple[Offload, list[PoolTransfer], list[Any]]) -> None:
        offload, transfers, events = task
        try:
            weights.require_the_same()
            stream = self._order.after(events)
            for transfer in transfers:
                source, keys = self._sources[transfer.name], list(transfer.keys or ())
                slots = source.slots(self._order.host(transfer.device_indices, events), len(keys))
                offload.stores.append((source.engine.store(source.prompt(keys), source.kv, slots, stream=stream), len(keys)))
        except BaseException as error:  # noqa: BLE001  (the tree waits for its node)
            offload.is_failed = True
            self._quiet.warn("store", "pages could not be stored: %s", error)
        finally:
            offload.is_begun = True

    def num_completed_offloads(self) -> int:
        """How many, from the oldest on, are over."""
        count = 0
        for offload in self._offloads:
            if not offload.is_over:
                break
            count += 1
        return count

    def pop_completed_offload(self) -> bool:
        """Whether the oldest that is over is stored."""
        offload = self._offloads.popleft()
        return self._quiet.guarded("stored", lambda: offload.is_stored, False)

    # The rest.

    def reset(self) -> None:
        """Waits for loads and offloads under way and forgets all promises. What is stored stays."""
        self._pending.clear()
        self._promises.clear()
        _wait_for("loads", self._loader.idle)
        _wait_for("offloads", self._saver.idle)
        for offload in self._offloads:
            # Drops the handles: what was not copied out of SGLang's slots yet is not stored.
            offload.stores.clear()
        self._offloads.clear()
        self._batches.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Waits for loads and offloads under way, makes stored pages durable, closes."""
        if self._loader.is_closed:
            return
        self._pending.clear()
        self._promises.clear()
        # The threads finish what was queued. Stores under way then have the time-out of the
        # engines' close.
        for what, worker in (("loads", self._loader), ("offloads", self._saver)):
            if not worker.close(CLOSE_TIMEOUT_MS / 1000):
                logger.warning("%s have not ended %d s after SGLang closed the cache, and are left alone", what, CLOSE_TIMEOUT_MS / 1000)
        for source in self._sources.values():
            self._quiet.guarded("closed", lambda source=source: source.engine.close(CLOSE_TIMEOUT_MS), None)
        self._offloads.clear()
        self._batches.clear()


class _Worker:
    """A thread that does one task after the other."""

    def __init__(self, name: str, do: Callable[[Any], None]) -> None:
        self._tasks: Queue[Any] = Queue()
        self._do = do
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.is_closed = False

    def give(self, task: Any) -> None:
        self._tasks.put(task)

    def idle(self, seconds: float) -> bool:
        """Whether all that was given is done; waits for it as long."""
        with self._tasks.all_tasks_done:
            return self._tasks.all_tasks_done.wait_for(lambda: self._tasks.unfinished_tasks == 0, seconds)

    def close(self, seconds: float) -> bool:
        """Ends the thread after what was given; whether it has ended in time."""
        self.is_closed = True
        self._tasks.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                if task is None:
                    return
                self._do(task)
            except Exception:  # noqa: BLE001  (the next task is waited for)
                logger.exception("a thread of the external linker met an error")
            finally:
                self._tasks.task_done()


def _wait_for(what: str, is_over: Callable[[float], bool]) -> None:
    """Waits, however long it takes, with a word in the log now and then."""
    while not is_over(CLOSE_TIMEOUT_MS / 1000):
        logger.warning("SGLang waits for %s: their slots cannot be used for other KV before they have ended", what)


class _Order:
    """Loads and stores in the order of SGLang's streams; nothing to do on a CPU."""

    def __init__(self, device: torch.device, forward_stream: Any) -> None:
        self._is_on_gpu, self._forward = device.type == "cuda", forward_stream
        self._copies = torch.cuda.Stream(device) if self._is_on_gpu else None
        self._indices = torch.cuda.Stream(device) if self._is_on_gpu else None

    def now(self) -> list[Any]:
        """Events after what SGLang has submitted so far, to the scheduler's stream and to the one on which the model runs."""
        if not self._is_on_gpu:
            return []
        return [stream.record_event() for stream in (torch.cuda.current_stream(), self._forward) if stream is not None]

    def after(self, events: list[Any]) -> Any:
        """A stream that waits for these events; slots may still be in use by earlier work."""
        for event in events:
            self._copies.wait_event(event)
        return self._copies

    def host(self, indices: torch.Tensor, events: list[Any]) -> torch.Tensor:
        """Indices on the host. They come from the scheduler's stream alone, so the model is not waited for."""
        if not self._is_on_gpu:
            return indices
        self._indices.wait_event(events[0])
        with torch.cuda.stream(self._indices):
            return indices.cpu()

    def landed(self) -> None:
        """Waits until the copies submitted so far are in place."""
        if self._is_on_gpu:
            self._copies.synchronize()


def _refuse(server_args: Any, params: Any) -> None:
    """What cannot be right is refused at the start."""
    if params.pp_size > 1:
        raise forebay.Unsupported(
            "pipeline parallelism with the external linker: SGLang does not let the stages agree on what is loaded; start without it, or "
            "use HiCache (docs/sglang.md)"
        )
    if getattr(server_args, "nnodes", 1) > 1:
        raise forebay.Unsupported("the external linker on several machines: a drive belongs to one; use one server for each machine")
    if getattr(server_args, "enable_memory_saver", False):
        raise forebay.Unsupported(
            "--enable-memory-saver with the external linker: SGLang takes the memory of its KV away while pages of it are on their way to the "
            "drive, which ends the server; start without it, or use HiCache (docs/sglang.md)"
        )


def _peers(params: Any) -> list[Any]:
    """The groups in which SGLang's tree agrees on a prefix, in its order."""
    if not torch.distributed.is_initialized():
        return []
    size = torch.distributed.get_world_size
    groups = [g for g in (params.attn_cp_cache_group, params.attn_tp_cache_group) if g is not None and size(group=g) > 1]
    if not groups and params.tp_cache_group is not None and size(group=params.tp_cache_group) > 1:
        groups = [params.tp_cache_group]
    return groups


def _rank(params: Any) -> tuple[int, int]:
    """Which of the ranks that share a prompt's KV this is, and how many there are."""
    group = params.attn_tp_cache_group or params.tp_cache_group
    if group is None or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
