"""The half of the connector that lives in vLLM's scheduler: it turns vLLM's requests and steps into
calls of the state machine.

It looks up and decides; it touches no KV. Prompts are hashed once, when a request arrives.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import FinishReason

from forebay._quiet import Quiet
from forebay.vllm import extra, geometry
from forebay.vllm.adapters import Adapters
from forebay.vllm.blend import resting
from forebay.vllm.events import Announcer
from forebay.vllm.meta import StepMetadata, WorkerMetadata
from forebay.vllm.settings import Settings
from forebay.vllm.stats import GAUGES
from forebay.vllm.unverified import Unverified

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from forebay.vllm.blend.planning import Planner

logger = logging.getLogger("vllm.forebay")


class SchedulerHalf:
    """One per scheduler."""

    def __init__(
        self, vllm_config: VllmConfig, kv: geometry.Shape, settings: Settings, announcer: Announcer | None
    ) -> None:
        """Caches are opened for lookups once the workers have said which they have; `announcer` where KV events are published."""
        from forebay.connector import SchedulerSide

        options = geometry.options(vllm_config, kv, settings)
        self._side = SchedulerSide.of_workers(settings.engine, **options)
        self._is_producer = vllm_config.kv_transfer_config.kv_role == "kv_producer"
        self._requests: dict[str, Request] = {}
        self._held: set[str] = set()
        # After a reset nothing is loaded or stored any more.
        self._resting = False
        # Tokens whose load was ordered, of each request, and requests whose load failed: for the
        # log.
        self._ordered: dict[str, int] = {}
        self._failed: set[str] = set()
        self._load_limit = settings.load_limit
        self._multiple = math.lcm(*kv.block_tokens)
        self._adapters = Adapters()
        self._numbers_media = extra.numbers_media(vllm_config)
        if self._numbers_media:
            logger.warning(
                "requests with multimodal inputs are not cached: without prefix caching and with mm_processor_cache_gb 0 vLLM numbers "
                "the inputs, and does not look at what they are; leave one of the two on"
            )
        self._announcer = announcer
        # Without prefix caching vLLM gives no request another one's blocks.
        self._unverified = Unverified() if vllm_config.cache_config.enable_prefix_caching else None
        # vLLM's prefix cache, and its KV cache groups; None where nothing is prefetched.
        self._cached: tuple[BlockPool, list[int]] | None = None
        self._reads_ahead = options["prefetch"] and vllm_config.cache_config.enable_prefix_caching
        self._groups = list(range(len(kv.block_tokens)))
        # Of the last answer: its request, tokens that vLLM has of it, and whether the load runs
        # within the step.
        self._answer = ("", 0, False)
        self._step = 0
        # The state machine does not know the requests that the planner has taken.
        self._planner = _planner(vllm_config, kv, settings) if settings.blends else None
        # Clients decide how often these come.
        self._quiet = Quiet(logger)
        resting.listen()

    def on_new_request(self, request: Request) -> None:
        """A new request; one that cannot be keyed by its tokens is left to vLLM alone."""
        if not isinstance(request.kv_transfer_params, dict | None):
            # Clients can set it to anything through `vllm_xargs`. vLLM's scheduler does not check
            # it either, and its engine would end.
            self._quiet.warn("params", "request %s: kv_transfer_params is no dictionary, and counts for nothing", request.request_id)
            request.kv_transfer_params = None
        if self._resting or getattr(request, "resumable", False):
            return
        if self._planner is None or not self._planner.takes(request):
            self._exactly(request)

    def _exactly(self, request: Request) -> None:
        """Takes up a request that is not blended."""
        if self._numbers_media and request.mm_features:
            return
        try:
            key = extra.extra(request, self._adapters)
        except extra.NotCacheable:
            return
        skip_save, skip_load = extra.skips(request)
        self._requests[request.request_id] = request
        self._side.on_new_request(
            request.request_id,
            request.prompt_token_ids,
            extra=key,
            skip_save=skip_save,
            skip_load=skip_load,
            transferred=extra.transferred(request),
            computed=self._computed(request),
        )

    def _computed(self, request: Request) -> int:
        """Tokens from a request's start that need not be read ahead: vLLM's prefix cache has them now, or it loads none."""
        if request.skip_reading_prefix_cache:
            return request.num_prompt_tokens
        if self._cached is None:
            return 0
        pool, groups = self._cached
        found = 0
        for block_hash in request.block_hashes:
            if pool.get_cached_block(block_hash, groups) is None:
                break
            found += pool.hash_block_size
        return found

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `num_computed_tokens` that can be loaded, and whether between steps."""
        if self._unverified is not None and self._unverified.concerns(request):
            return None, False
        if self._planner is not None and self._planner.has(request.request_id):
            return self._planner.matched(request.request_id, num_computed_tokens)
        if request.request_id not in self._requests:
            return 0, False
        tokens, asynchronous = self._side.get_num_new_matched_tokens(request.request_id, num_computed_tokens)
        if tokens and self._load_limit is not None:
            tokens = self._limited(request, num_computed_tokens, tokens)
        self._answer = (request.request_id, num_computed_tokens, bool(tokens) and not asynchronous)
        return tokens, bool(tokens) and asynchronous

    def _limited(self, request: Request, computed: int, tokens: int) -> int:
        """What the user's function leaves of `tokens`, in whole blocks; nothing where it fails."""
        try:
            most = int(self._load_limit(request, computed, tokens))
        except Exception as error:  # noqa: BLE001 - it is the user's own
            # vLLM asks again in every step in which the request waits.
            kind = f"load_limit {type(error).__name__}"
            self._quiet.warn(kind, "load_limit failed for request %s, which is computed: %r", request.request_id, error)
            most = 0
        return max(0, min(most, tokens)) // self._multiple * self._multiple

    def update_state_after_alloc(self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int) -> None:
        """vLLM gave the request these blocks, the last of them for `num_external_tokens` to load."""
        if self._planner is not None and self._planner.has(request.request_id):
            self._planner.allocated(request.request_id, block_ids[0], num_external_tokens)
        if request.request_id not in self._requests:
            return
        self._side.update_state_after_alloc(request.request_id, [list(group) for group in block_ids], num_external_tokens)
        if num_external_tokens > 0:
            self._ordered[request.request_id] = num_external_tokens
        # The last answer is the one for this request: vLLM allocates before it asks again.
        req_id, computed, is_within_step = self._answer
        is_within_step = is_within_step and req_id == request.request_id and num_external_tokens > 0
        if self._unverified is not None and is_within_step:
            self._unverified.began(request, computed, (block for group in block_ids for block in group), self._step + 1)

    def build_connector_meta(self, output: SchedulerOutput) -> StepMetadata:
        """What the workers do around this step."""
        scheduled, cached, known = output.num_scheduled_tokens, output.scheduled_cached_reqs, self._requests
        new = [
            (r.req_id, r.block_ids, r.num_computed_tokens, scheduled[r.req_id])
            for r in output.scheduled_new_reqs
            if r.req_id in known
        ]
        # vLLM's lists as they are: this runs in every step for every running request.
        running = (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, scheduled, cached.resumed_req_ids)
        # 0: not measured. A step that also computes blends would make computing seem slow.
        is_blending = self._planner is not None and self._planner.is_blending
        step = self._side.build_connector_meta(
            new,
            None if self._resting else running,
            output.finished_req_ids,
            output.preempted_req_ids,
            tokens_of=self._tokens_of,
            num_scheduled=0 if is_blending else output.total_num_scheduled_tokens,
        )
        self._step += 1
        if self._unverified is not None:
            self._unverified.scheduled(output)
        self._publish()
        held, self._held = frozenset(self._held), set()
        blends = () if self._planner is None else self._planner.jobs()
        # After a reset vLLM frees the blocks of a request at its end. What still reads them must be
        # given up before the step runs: `start_load_kv` may come after the model.
        preempts = bool(output.preempted_req_ids) or (self._resting and bool(output.finished_req_ids))
        return StepMetadata(step, preempts, blends, held, self._resting)

    def _tokens_of(self, req_id: str, start: int, stop: int) -> Sequence[int]:
        # This list has final tokens only: no placeholders of asynchronous scheduling, no unverified
        # drafts.
        request = self._requests.get(req_id)
        return [] if request is None else list(request.all_token_ids[start:stop])

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """What the workers reported at the end of a step."""
        meta = output.kv_connector_worker_meta
        parts = meta.parts if type(meta) is WorkerMetadata else None
        over = output.finished_recving
        if self._planner is not None:
            report = self._planner.reported(over or (), output.failed_recving or ())
            over = report.over
            for request in report.computed:
                self._exactly(request)
        # vLLM's own list also has failures of other connectors. The workers report ours.
        failed = self._side.update_connector_output(output.finished_sending, over, parts)
        self._failed.update(req_id for req_id in failed if req_id in self._requests)
        if self._unverified is not None:
            self._unverified.ended(self._side.verified_step(), failed)
        self._publish()

    def _publish(self) -> None:
        if self._announcer is not None and not self._resting and (chunk_events := self._side.take_events()) is not None:
            self._side.not_taken_back(self._announcer.publish(self._requests, chunk_events))

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """vLLM's blocks."""
        if self._announcer is not None:
            self._announcer.bind(pool.hash_block_size)
        if self._unverified is not None:
            self._unverified.bind(pool)
        if self._reads_ahead:
            self._cached = pool, self._groups

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call."""
        return [] if self._announcer is None else self._announcer.take()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM must keep the finished request's blocks until the workers report it as sent, and what a producer's client
        hands to the consumer."""
        handover = None
        if self._is_producer and request.request_id in self._requests:
            handover = {extra.TRANSFERRED: self._side.transferred(request.request_id)}
        return self._keep(request), handover

    def _keep(self, request: Request) -> bool:
        req_id = request.request_id
        if self._planner is not None:
            self._planner.finished(req_id)
        if req_id not in self._requests:
            return False
        if logger.isEnabledFor(logging.DEBUG):
            self._log(request)
        self._ordered.pop(req_id, None)
        self._failed.discard(req_id)
        # vLLM itself keeps the blocks of an aborted load until the load is reported as over. Kept
        # here too, they would be freed twice.
        of_vllm = self._side.is_loading(req_id)
        keep = self._side.request_finished(req_id, request.num_output_tokens) and not of_vllm
        # Later events of this request need its hashes, which go now.
        self._publish()
        del self._requests[req_id]
        if keep:
            self._held.add(req_id)
        return keep

    def _log(self, request: Request) -> None:
        """Logs what became of a request, in the form of LMCache's log line."""
        req_id, (skip_save, skip_load) = request.request_id, extra.skips(request)
        retrieved, stored = self._ordered.get(req_id, 0), self._side.transferred(req_id)
        # vLLM may end a request whose load failed before it reports the failure here.
        if req_id in self._failed or (retrieved and request.get_finished_reason() == FinishReason.ERROR):
            not_more = "of the load that failed"
        elif skip_load:
            not_more = "as it was asked to skip loading"
        else:
            not_more = "as no more was stored, in vLLM's own cache, or worth it"
        not_all = "as it was asked to skip storing" if skip_save else f"in chunks of {self._side.chunk_tokens}"
        logger.debug(
            "[req_id=%s] Retrieved %d out of %d prompt tokens, %s. Stored %d out of total %d tokens, %s",
            req_id, retrieved, request.num_prompt_tokens, not_more, stored, request.num_tokens, not_all,
        )

    @property
    def rests(self) -> bool:
        """Whether the cache was reset."""
        return self._resting

    def reset_cache(self) -> bool:
        """vLLM's weights may have changed in place: from now on nothing is loaded and nothing is stored.

        What the weights are now is not known, so what they compute has no namespace; that of the start would be wrong.
        """
        if not self._resting:
            logger.warning("the connector's cache was reset: Forebay loads and stores nothing until this server is restarted")
        self._resting = True
        # Stores that wait for the next step: their blocks may have KV of the new weights by then.
        self._side.reset_cache()
        self._requests.clear()
        if self._planner is not None:
            self._planner.clear()
        self._ordered.clear()
        self._failed.clear()
        if self._announcer is not None:
            self._announcer.cleared()
        return True

    def stats(self) -> dict[str, Any]:
        """Counters of the state machine."""
        return {f"scheduler_{name}": value for name, value in self._side.stats().items()}

    def get_kv_connector_stats(self) -> dict[str, int]:
        """What the counters grew by since the last call."""
        blends = {} if self._planner is None else self._planner.counts()
        grown = self._side.get_kv_connector_stats()
        # Gauges are one with the workers': the largest value holds.
        return blends | {name if name in GAUGES else f"scheduler_{name}": value for name, value in grown.items()}

    def shutdown(self) -> None:
        """Closes the cache; safe to call again."""
        self._side.shutdown()


def _planner(vllm_config: VllmConfig, kv: geometry.Shape, settings: Settings) -> Planner:
    # Imports what is of no use to a server that does not blend.
    from forebay.vllm.blend.planning import Planner

    return Planner(vllm_config, kv.block_tokens[0], settings)
