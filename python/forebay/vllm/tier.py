"""Forebay below vLLM's own CPU tier: a `SecondaryTierManager` for `OffloadingConnector` with `TieringOffloadingSpec`.

vLLM copies blocks to its CPU tier and hands each of them to this tier; a block that has left the
CPU tier is brought back there first. One object holds one block of the CPU tier, of all ranks,
under vLLM's block hash and group.

A block that cannot be read, or fails its check, is a failed key of its load; vLLM then asks again, gets a miss,
and computes it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

import forebay
from forebay.vllm import checks, identity, logs, settings, tier_compat
from forebay.vllm import extra as extra_keys
from forebay.vllm.geometry import Unsupported
from forebay.vllm.tier_jobs import Rows, Transfers

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = logging.getLogger("vllm.forebay")

#: How long a shutdown may take, and up to two I/O time-outs more where a drive hangs: blocks on
#: their way to the drive have half of it.
CLOSE_TIMEOUT_MS = 30_000


class ForebayTier(SecondaryTierManager):
    """vLLM's tier of type `forebay`."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **extra: Any,
    ) -> None:
        """As vLLM's factory calls it; `extra` is the tier's section of the configuration."""
        tier_compat.check_version()
        logs.join()
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = _locality(extra.pop("locality", Locality.LOCAL.value))
        wants_events = settings.is_on("tier: enable_kv_events", extra.pop("enable_kv_events", False))
        self._events: list[OffloadingEvent] | None = None
        if wants_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        keep_after_reset = settings.is_on("tier: keep_after_reset", extra.pop("keep_after_reset", False))
        if settings.LOAD_LIMIT in extra:
            raise Unsupported(f"tier: {settings.LOAD_LIMIT} has no effect here, vLLM decides what it loads from a tier; leave it out")
        read = settings.read(extra)
        rows = _rows(primary_kv_view)
        config = tier_compat.find_config()
        if config is not None:
            checks.fixed_weights(config)
            checks.known_weights(config, read.fingerprint)
        if config is not None and extra_keys.numbers_media(config):
            raise Unsupported(
                "tier: without prefix caching and with mm_processor_cache_gb 0 vLLM numbers multimodal inputs, so that a block's key "
                "means another block after a restart; leave one of the two on"
            )
        namespace = tier_compat.namespace(offloading_spec, rows.row_bytes, read.fingerprint, config)
        store = forebay.ObjectStore(read.engine, namespace)
        if not store.is_up:
            logger.warning("tier: the cache could not be opened; everything is a miss until it can be: %s", store.why_disabled)
        dtype = None if config is None else identity.kv_dtype(config)
        self._transfers = Transfers(store, rows, read.resolved["load_timeout_ms"], read.resolved["mode"] == "ro", dtype)
        self._keep_after_reset = keep_after_reset
        self._is_shut = False

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a block is stored; `RETRY` in the step in which it is first asked for."""
        if self._transfers.rests:
            return LookupResult.MISS
        found = self._transfers.lookups.ask(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begins to store blocks of the CPU tier."""
        self._transfers.save(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begins to fill blocks of the CPU tier."""
        self._transfers.load(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that are over since the last call."""
        results = []
        for outcome in self._transfers.poll():
            is_stored = self._transfers.stores and not outcome.is_load and outcome.succeeded
            if self._events is not None and is_stored:
                keys = [OffloadKey(key) for key in outcome.succeeded]
                self._events.append(OffloadingEvent(keys=keys, medium=self.medium, removed=False, locality=self.locality))
            results.append(
                JobResult(
                    job_id=outcome.job,
                    success=outcome.success,
                    successful_keys=outcome.succeeded or None,
                    transfer_time=outcome.seconds,
                    transfer_bytes=outcome.moved_bytes,
                )
            )
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that were stored since the last call."""
        if self._events is None:
            return ()
        taken, self._events = self._events, []
        return taken

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Blocks are stored one by one as they are computed."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forgets what a request asked for."""
        self._transfers.lookups.forget(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Asks for this step's keys, in one batch, while the model runs."""
        self._transfers.flush_lookups()

    def drain_jobs(self) -> None:
        """Waits until nothing touches the CPU tier any more.

        vLLM calls it only from `reset_cache`, before a sleep or new weights, and does not say which. New weights make every
        stored block wrong, so the tier rests from here on unless the settings say that they never change.
        """
        # First: whatever the wait comes to, what is stored is wrong from here on.
        if not self._keep_after_reset and not self._transfers.rests:
            self._transfers.rest()
            logger.warning(
                "tier: vLLM reset its caches; the weights may be others now, so nothing is loaded or stored until a restart "
                "(keep_after_reset: true if they never change)"
            )
        self._transfers.drain()

    def shutdown(self) -> None:
        """Waits for blocks on their way to the drive, and closes; raises nothing."""
        if not self._is_shut:
            self._is_shut = True
            self._transfers.close(CLOSE_TIMEOUT_MS)


def _locality(given: Any) -> Locality:
    """Which servers find what is stored here, as vLLM tells of it."""
    try:
        return Locality(given)
    except ValueError as error:
        values = ", ".join(str(one.value) for one in Locality)
        raise ValueError(f"tier: locality is {given!r}: give one of {values}") from error


def _rows(view: memoryview) -> Rows:
    """Where the CPU tier's blocks lie."""
    if view.ndim != 2 or view.itemsize != 1 or not view.c_contiguous or view.readonly:
        raise Unsupported(f"tier: a CPU tier of shape {view.shape} and strides {view.strides} is not rows of bytes")
    array = np.asarray(view)
    # Only the address is kept: an array would keep vLLM from freeing the memory. vLLM frees it
    # after `shutdown`.
    return Rows(int(array.ctypes.data), array.shape[0], array.strides[0])
