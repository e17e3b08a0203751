"""`ForebayConnector`: vLLM's connector interface, call by call, onto the two halves of Forebay's.

No decision is taken here. The methods that vLLM calls on the scheduler's instance go to `SchedulerHalf`, those of the workers'
instances to `WorkerHalf`.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from forebay.vllm import checks, geometry, logs, settings
from forebay.vllm.events import Announcer
from forebay.vllm.meta import StepMetadata, WorkerMetadata
from forebay.vllm.scheduling import SchedulerHalf
from forebay.vllm.stats import ForebayMetrics, ForebayStats
from forebay.vllm.working import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class ForebayConnector(KVConnectorBase_V1, SupportsHMA):
    """KV of prompts on local NVMe, kept over restarts and shared by the servers of a machine."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """As vLLM makes it: once for the scheduler, once in each worker."""
        super().__init__(vllm_config, role, kv_cache_config)
        logs.join()
        read = settings.read(self._kv_transfer_config.kv_connector_extra_config)
        kv = geometry.shape(vllm_config, kv_cache_config)
        read = geometry.fitted(kv, checks.layerwise(vllm_config, kv, read))
        checks.sleep_mode(vllm_config)
        checks.fixed_weights(vllm_config)
        checks.known_weights(vllm_config, read.fingerprint)
        checks.routed_experts(vllm_config)
        checks.pooling(vllm_config)
        checks.siblings()
        checks.failure_policy(vllm_config, read)
        checks.blending(vllm_config, read)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            has_remote = bool(read.resolved["remote_url"])
            wanted = geometry.events_wanted(vllm_config)
            announcer = Announcer(kv_cache_config, kv.block_tokens, has_remote) if wanted else None
            self._scheduler = SchedulerHalf(vllm_config, kv, read, announcer)
        else:
            self._worker = WorkerHalf(vllm_config, kv, read)
        atexit.register(_shutdown, weakref.ref(self))

    # What vLLM asks of the class.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full CUDA graphs skip the layer hooks, which only layer-wise loads need."""
        return settings.read(extra_config).layerwise

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """No: the tensors would move under the engine. vLLM 0.33 asks this."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ForebayStats:
        """Counters that another process sent."""
        return ForebayStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> ForebayMetrics:
        """Counters for the Prometheus page."""
        return ForebayMetrics(*args, **kwargs)

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a later miss, nothing more."""
        return False

    # The scheduler's calls.

    def on_new_request(self, request: Request) -> None:
        """A new request: its prompt is hashed, or its blend planned."""
        assert self._scheduler is not None
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load; may be asked again and the answer be dropped."""
        assert self._scheduler is not None
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The blocks to load into."""
        assert self._scheduler is not None
        self._scheduler.update_state_after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """This step's loads and stores."""
        assert self._scheduler is not None
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers reported."""
        assert self._scheduler is not None
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must be kept for now, and what is handed to a producer's client."""
        assert self._scheduler is not None
        return self._scheduler.request_finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must be kept for now, and what is handed to a producer's client."""
        assert self._scheduler is not None
        return self._scheduler.request_finished(request)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All groups: a model with KV that cannot be loaded is refused at the start. Of a group with
        a sliding window, the blocks are loaded that vLLM allocated: those of the last window."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """vLLM's blocks and its prefix cache: for events, and for blocks whose load failed."""
        if self._scheduler is not None:
            self._scheduler.bind_gpu_block_pool(gpu_block_pool)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Blocks that can be loaded from now on, or cannot any more."""
        return () if self._scheduler is None else self._scheduler.take_events()

    def reset_cache(self) -> bool | None:
        """After new weights: nothing is loaded or stored any more until the server starts again."""
        return None if self._scheduler is None else self._scheduler.reset_cache()

    # The workers' calls.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Opens the cache over these tensors."""
        assert self._worker is not None
        self._worker.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before preempted requests' blocks are overwritten."""
        assert self._worker is not None and isinstance(kv_connector_metadata, StepMetadata)
        self._worker.handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Starts this step's loads."""
        assert self._worker is not None
        self._worker.start_load_kv(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for a layer of this step's loads; nothing without `use_layerwise`."""
        if self._worker is not None:
            self._worker.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """A layer is computed and may be stored; nothing without `use_layerwise`."""
        if self._worker is not None:
            self._worker.save_kv_layer(layer_name)

    def wait_for_save(self) -> None:
        """Starts this step's stores, without waiting for a drive; computes a step's share of blends."""
        assert self._worker is not None
        self._worker.wait_for_save(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """For callers that do not ask for failures."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that are over, loads that failed, and requests whose blocks may be freed."""
        assert self._worker is not None
        sending, recving, failed = self._worker.get_transfer_results(finished_req_ids)
        return KVConnectorTransferResults(finished_sending=sending, finished_recving=recving, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed."""
        assert self._worker is not None
        return self._worker.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """The report for the scheduler."""
        assert self._worker is not None
        return self._worker.build_connector_worker_meta()

    def for_blending(self) -> tuple[Any, geometry.Shape, settings.Settings]:
        """The worker's engine, the KV that it stores, and its settings."""
        assert self._worker is not None
        return self._worker.for_blending()

    # Both.

    def get_kv_connector_stats(self) -> ForebayStats | None:
        """What was counted since the last call."""
        half = self._scheduler or self._worker
        assert half is not None
        grown = half.get_kv_connector_stats()
        return ForebayStats(grown) if grown else None

    def shutdown(self) -> None:
        """Finishes the stores that have begun and closes the cache."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.shutdown()

    def _step(self) -> StepMetadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMetadata)
        return meta


def _shutdown(of: weakref.ref[ForebayConnector]) -> None:
    connector = of()
    if connector is not None:
        connector.shutdown()
