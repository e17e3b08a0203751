"""The half of the connector that lives in vLLM's workers: starts loads and stores, and says when they are over.

It never waits for a drive inside a step, except with `use_layerwise` or with `enable_async_loading`
off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from forebay.vllm import geometry
from forebay.vllm.meta import StepMetadata, WorkerMetadata
from forebay.vllm.settings import Settings

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from forebay.vllm.blend.live import Live

logger = logging.getLogger("vllm.forebay")


class WorkerHalf:
    """One per worker."""

    def __init__(self, vllm_config: VllmConfig, kv: geometry.Shape, settings: Settings) -> None:
        """Nothing is opened before vLLM has made its KV caches."""
        self._config, self._kv, self._settings = vllm_config, kv, settings
        self._engine: Any = None
        self._side: Any = None
        self._cuda = False
        self._layer_of = {layer.name: index for index, layer in enumerate(kv.layers)}
        self._held: set[str] = set()
        # A step has begun and is not known to be computed.
        self._is_open = False
        self._blends: Live | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Opens the cache over vLLM's tensors."""
        import forebay
        from forebay.connector import WorkerSide

        if self._side is not None:
            raise geometry.Unsupported("vLLM registered its KV caches twice")
        blocks = geometry.views(self._kv, kv_caches)
        device = blocks[0].view.device
        self._cuda = device.type == "cuda"
        ranks = self._kv.ranks
        rank = self._config.parallel_config.rank % ranks.workers
        shape = geometry.geometry(self._config, self._kv, rank, blocks)
        name = f"cuda:{device.index or 0}" if self._cuda else "cpu"
        self._engine = forebay.Engine(self._settings.engine, shape, device=name)
        options = geometry.options(self._config, self._kv, self._settings)
        # A guess, until the scheduler says which ranks store nothing.
        silent = rank % ranks.tp >= self._kv.own
        views = self._engine.paged_kv([of.view for of in blocks], layout="BTHD")
        self._side = WorkerSide(self._engine, views, rank=rank, silent=silent, **options)
        if self._settings.blends:
            self._blends = self._live()

    def _live(self) -> Live:
        from forebay.vllm.blend.blender import Connector
        from forebay.vllm.blend.live import Live
        from forebay.vllm.blend.planning import defaults
        from forebay.vllm.blend.worker import runner_of

        select, _, check_layers, _ = defaults(self._settings)
        return Live(runner_of(self._config), Connector(*self.for_blending()), select, check_layers)

    def for_blending(self) -> tuple[Any, geometry.Shape, Settings]:
        """The engine, the KV that it stores, and its settings; vLLM must have registered its KV caches."""
        if self._engine is None:
            raise geometry.Unsupported("vLLM has registered no KV cache; start it with a model that has one")
        return self._engine, self._kv, self._settings

    def _stream(self) -> int | None:
        if not self._cuda:
            return None
        import torch

        return torch.cuda.current_stream().cuda_stream

    def handle_preemptions(self, meta: StepMetadata) -> None:
        """Before blocks of preempted requests are overwritten."""
        # With speculative decoding the first model runner of vLLM 0.32 and 0.33 calls
        # `wait_for_save` on the last pipeline stage alone. On the others a step is computed before
        # the next begins.
        self._end_step()
        if self._side is not None and meta.preempts:
            self._side.handle_preemptions(meta.step)

    def start_load_kv(self, meta: StepMetadata) -> None:
        """Starts this step's loads."""
        self._held |= meta.held
        if self._side is not None and meta.step:
            self._is_open = True
            self._side.start_load_kv(meta.step, stream=self._stream())
        if self._blends is not None:
            if meta.rests:
                self._blends.rest()
            self._blends.add(meta.blends)

    def wait_for_layer_load(self, name: str) -> None:
        """Layer by layer: waits until this layer is loaded."""
        if self._side is not None and self._settings.layerwise and name in self._layer_of:
            self._side.wait_for_layer_load(self._layer_of[name], stream=self._stream())

    def save_kv_layer(self, name: str) -> None:
        """Layer by layer: this layer is computed."""
        if self._side is not None and self._settings.layerwise and name in self._layer_of:
            self._side.save_kv_layer(self._layer_of[name], stream=self._stream())

    def wait_for_save(self, meta: StepMetadata) -> None:
        """Starts this step's stores; then computes a step's share of blends."""
        if meta.step:
            self._end_step()
        if self._blends is not None:
            self._blends.advance()

    def _end_step(self) -> None:
        if self._side is not None and self._is_open:
            self._is_open = False
            self._side.wait_for_save(stream=self._stream())

    def get_transfer_results(self, finished_req_ids: set[str]) -> tuple[set[str], set[str], set[str]]:
        """Requests whose blocks may be freed, whose loads are over, and those of these of which nothing was loaded."""
        if self._side is None:
            return set(), set(), set()
        sending, recving = self._side.get_finished(set(finished_req_ids))
        # vLLM frees what is reported as sent at once, and fails on a request that it did not keep.
        sending = set(sending) & self._held
        self._held -= sending
        blended, not_blended = (set(), set()) if self._blends is None else self._blends.results(finished_req_ids)
        # A load within a step is never reported as over, and vLLM has its blocks.
        failed = set(self._side.failed_requests()) & set(recving)
        return sending, set(recving) | blended, failed | not_blended

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed: vLLM keeps what was loaded before the first of them.

        Where blocks cannot say it (several groups, a window's load between steps), `get_transfer_results` reports whole requests instead.
        """
        return set() if self._side is None else set(self._side.get_block_ids_with_load_errors())

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """The report for the scheduler."""
        part = None if self._side is None else self._side.build_connector_worker_meta()
        return WorkerMetadata([part]) if part else None

    def stats(self) -> dict[str, Any]:
        """Counters of the state machine."""
        return {} if self._side is None else self._side.stats()

    def get_kv_connector_stats(self) -> dict[str, int]:
        """What the counters grew by since the last call."""
        blends = {} if self._blends is None else self._blends.counts()
        return blends if self._side is None else blends | self._side.get_kv_connector_stats()

    def shutdown(self) -> None:
        """Waits for what is being stored, then closes the cache; safe to call again, and raises nothing.

        A cache that fails now, such as one whose files are gone, loses what was not stored and stops no server's end.
        """
        side, blends, engine = self._side, self._blends, self._engine
        self._side = self._blends = self._engine = None
        if side is not None:
            _closed("the connector's stores", side.shutdown)
        if blends is not None:
            _closed("the segments", blends.close)
        if engine is not None:
            _closed("the cache", lambda: _flushed_and_closed(engine))


def _flushed_and_closed(engine: Any) -> None:
    try:
        # A cache that never opened has nothing to lose.
        if engine.is_up:
            engine.flush()
    finally:
        engine.close()


def _closed(what: str, close: Callable[[], object]) -> None:
    """Closes one thing. Where that fails the others are closed all the same."""
    try:
        close()
    except Exception as error:  # noqa: BLE001 - the server's end goes on
        logger.warning("%s could not be closed properly, what was being stored at the end is lost: %s", what, error)
