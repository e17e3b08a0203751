"""One engine: vLLM's scheduler, the connector in both roles, the aggregator of the workers' outputs, and the fake runner.

It steps as vLLM's EngineCore does: without asynchronous scheduling one step after the other; with it a step is scheduled and started
before the scheduler has the output of the step before.
"""

from __future__ import annotations

import copy
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVEventsConfig, KVTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from .kv import VOCABULARY, generated
from .runner import Layer, Rank, Runner, Share

BLOCK_TOKENS, CHUNK_TOKENS, MAX_TOKENS = 16, 32, 1024
KV_HEADS, HEAD_SIZE = 2, 4
#: Seconds without a token, a finished request or a transfer's end after which a server counts as hanging.
HANGS_S = 120.0
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": MAX_TOKENS,
    "torch_dtype": "float32",
}


class Hangs(AssertionError):
    """Nothing happens any more."""


@dataclass(frozen=True)
class Shape:
    """What a server is started with."""

    asynchronous: bool = False
    second_runner: bool = False
    asks_first: bool = False
    """vLLM asks what has ended before it ends a step, as with speculative decoding."""
    ranks: int = 2
    """Ranks of tensor parallelism."""
    stages: int = 1
    """Stages of pipeline parallelism."""
    context: int = 1
    """Ranks of decode context parallelism, among those of tensor parallelism."""
    interleave: int = 1
    """Consecutive tokens whose KV one of these ranks has, before those of the next rank."""
    elsewhere: tuple[int, ...] = ()
    """Workers whose cache lies where the scheduler does not look, as on another machine."""
    blocks: int = 64
    max_requests: int = 8
    batch_tokens: int = 128
    long_prefill_tokens: int = 0
    prefix_caching: bool = True
    windows: tuple[int | None, ...] = (None,)
    """One KV cache group for each: its sliding window."""
    depth: int = 2
    """Layers of a group in each stage; of several stages the last one has one more."""
    pieces: str = ""
    """A block's K and V lie apart: `outer`, each of all blocks together, or `inner`, each block's of all layers together."""
    mla: bool = False
    """Every rank computes the same latent KV."""
    events: bool = False
    """KV events are published, to `Server.events`."""
    role: str = "kv_both"
    policy: str = "recompute"
    """vLLM's `kv_load_failure_policy`."""
    device: str = "cpu"
    connector: str = "ForebayConnector"
    connector_module: str = "forebay.vllm"
    settings: dict[str, Any] = field(default_factory=dict)
    """More of `kv_connector_extra_config`."""

    def __post_init__(self) -> None:
        """Refuses what vLLM refuses: its first runner loses tokens of requests that a step leaves out while they are under way in an
        earlier stage."""
        assert not (self.asynchronous and self.stages > 1) or self.second_runner, "stages ahead need vLLM's second runner"

    @property
    def workers(self) -> int:
        """Ranks of all stages."""
        return self.ranks * self.stages

    @property
    def block_tokens(self) -> int:
        """Tokens of a request that a block stands for."""
        return BLOCK_TOKENS * self.context

    @property
    def steps_ahead(self) -> int:
        """Steps that are under way at once."""
        return self.stages + self.asynchronous

    def cache(self, folder: Path, rank: int) -> Path:
        """Where a worker's cache lies."""
        return folder / (f"cache-{rank}" if rank in self.elsewhere else "cache")

    def layers(self, group: int, stage: int) -> list[int]:
        """The numbers of a stage's layers in a group."""
        count, first = self.depth * self.stages + (self.stages > 1), stage * self.depth
        last = count if stage == self.stages - 1 else first + self.depth
        return [group * count + layer for layer in range(first, last)]


@dataclass
class Asked:
    """A request that was sent, and what came of it."""

    prompt: list[int]
    max_tokens: int
    stop: list[int]
    output: list[int] = field(default_factory=list)
    finished: str | None = None
    """Why it ended; None until it has."""
    aborted: bool = False


_model: list[ModelConfig] = []


def _model_config(folder: Path) -> ModelConfig:
    """Made once: vLLM's inspection of a model takes seconds."""
    if not _model:
        init_none_hash(sha256)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        # A file without tensors: what it says is the identity of the weights.
        (folder / "model" / "model.safetensors").write_bytes(len(b"{}").to_bytes(8, "little") + b"{}")
        path = str(folder / "model")
        _model.append(ModelConfig(model=path, dtype="float32", seed=0, skip_tokenizer_init=True, max_model_len=MAX_TOKENS))
    return _model[0]


def vllm_config(shape: Shape, folder: Path) -> VllmConfig:
    """vLLM's configuration of a server of this shape; its caches lie in `folder`."""
    scheduling = SchedulerConfig(
        max_num_seqs=shape.max_requests,
        max_num_batched_tokens=shape.batch_tokens,
        max_model_len=MAX_TOKENS,
        enable_chunked_prefill=True,
        long_prefill_token_threshold=shape.long_prefill_tokens,
        async_scheduling=shape.asynchronous,
        is_encoder_decoder=False,
    )
    extra = {
        "backend": "gds",
        "gds_config": {"cache_dir": str(folder / "cache")},
        "capacity": "16MiB",
        # However full the drive of the machine that tests.
        "min_free": 0,
        "chunk_size": CHUNK_TOKENS,
    }
    transfer = KVTransferConfig(
        kv_connector=shape.connector,
        kv_connector_module_path=shape.connector_module,
        kv_role=shape.role,
        kv_load_failure_policy=shape.policy,
        kv_connector_extra_config=extra | shape.settings,
    )
    config = VllmConfig(
        model_config=_model_config(folder),
        scheduler_config=scheduling,
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=shape.prefix_caching),
        kv_transfer_config=transfer,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if shape.events else None,
    )
    # vLLM would look for devices and start no executor here: set when all of its own checks are over.
    config.parallel_config.tensor_parallel_size = shape.ranks
    config.parallel_config.pipeline_parallel_size = shape.stages
    config.parallel_config.decode_context_parallel_size = shape.context
    config.parallel_config.cp_kv_cache_interleave_size = shape.interleave
    config.scheduler_config.async_scheduling = shape.asynchronous
    config.cache_config.num_gpu_blocks = shape.blocks
    return config


def _kv(shape: Shape, stage: int) -> KVCacheConfig:
    """The KV caches of a stage's workers, as vLLM describes them; the scheduler gets the description of the first stage."""
    return KVCacheConfig(num_blocks=shape.blocks, kv_cache_tensors=[], kv_cache_groups=_groups(shape, stage))


def _groups(shape: Shape, stage: int) -> list[KVCacheGroupSpec]:
    size = {"block_size": BLOCK_TOKENS, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "dtype": torch.float32}
    groups = []
    for i, window in enumerate(shape.windows):
        names = [f"model.layers.{layer}.self_attn.attn" for layer in shape.layers(i, stage)]
        spec = FullAttentionSpec(**size) if window is None else SlidingWindowSpec(**size, sliding_window=window)
        if shape.mla:
            # As many bytes of a token as the other kind has.
            spec = MLAAttentionSpec(**size | {"num_kv_heads": 1, "head_size": 2 * KV_HEADS * HEAD_SIZE})
        groups.append(KVCacheGroupSpec(names, spec))
    return groups


def _memory(shape: Shape, layers: int) -> torch.Tensor:
    """KV of so many layers: `[layers, blocks, 2, tokens, heads, head size]`, however it lies."""
    inner = (BLOCK_TOKENS, KV_HEADS, HEAD_SIZE)
    physical = {
        "": ((layers, shape.blocks, 2), (0, 1, 2)),
        "outer": ((layers, 2, shape.blocks), (0, 2, 1)),
        "inner": ((shape.blocks, 2, layers), (2, 0, 1)),
    }
    sizes, order = physical[shape.pieces]
    made = torch.zeros((*sizes, *inner), dtype=torch.float32, device=shape.device)
    return made.permute(*order, 3, 4, 5)


class Server:
    """An engine."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        """Starts it; `folder` holds the caches of this server and of earlier ones."""
        self.shape, self.asked = shape, dict[str, Asked]()
        config = vllm_config(shape, folder)
        kind = AsyncScheduler if shape.asynchronous else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=_kv(shape, 0),
            structured_output_manager=StructuredOutputManager(config),
            block_size=shape.block_tokens,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = shape.second_runner
        self.hasher = get_request_block_hasher(shape.block_tokens, sha256)
        ranks = [self._rank(config, folder, rank) for rank in range(shape.workers)]
        self.runner = Runner(
            ranks, shape.asynchronous, shape.second_runner, fails=shape.policy == "fail", asks_first=shape.asks_first
        )
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, shape.workers)
        self.events: list[Any] = []
        self._watch_events()
        self.handed_over: dict[str, dict[str, Any]] = {}
        self.queue: deque[tuple[Any, list[ModelRunnerOutput]]] = deque()
        self.loaded_tokens = self.failed_loads = self.preemptions = self.steps = 0
        self._fresh: list[tuple[int, list[int]]] = []
        self._watch_pool()
        self.own_loads: dict[str, set[int]] = {}
        self._watch_loads()
        self.errors = 0
        self._moved = time.monotonic()

    def _rank(self, config: VllmConfig, folder: Path, rank: int) -> Rank:
        shape, (stage, tp_rank) = self.shape, divmod(rank, self.shape.ranks)
        own = copy.copy(config)
        own.parallel_config = copy.copy(config.parallel_config)
        own.parallel_config.rank = rank
        own.kv_transfer_config = copy.copy(config.kv_transfer_config)
        extra = own.kv_transfer_config.kv_connector_extra_config
        place = {"gds_config": {"cache_dir": str(shape.cache(folder, rank))}}
        own.kv_transfer_config.kv_connector_extra_config = extra | (place if rank in shape.elsewhere else {})
        kv = _kv(shape, stage)
        connector = KVConnectorFactory.create_connector(own, KVConnectorRole.WORKER, kv)
        layers, tensors = [], {}
        memory = _memory(shape, sum(len(group.layer_names) for group in kv.kv_cache_groups))
        for index, (group, window) in enumerate(zip(kv.kv_cache_groups, shape.windows)):
            for name, number in zip(group.layer_names, shape.layers(index, stage)):
                layers.append(Layer(name, index, window, number))
                tensors[name] = memory[len(tensors)]
        share = Share(tp_rank % shape.context, shape.context, shape.interleave)
        return Rank(rank, layers, tensors, connector, 0 if shape.mla else tp_rank, share)

    def _watch_events(self) -> None:
        """Keeps the KV events that the connector gives to vLLM."""
        connector, take = self.scheduler.connector, self.scheduler.connector.take_events

        def watched() -> list[Any]:
            events = list(take())
            self.events += events
            return events

        connector.take_events = watched

    def _watch_loads(self) -> None:
        """Notes which blocks are loaded for which request: a request must not end for another one's failed load."""
        connector, computed = self.scheduler.connector, dict[str, int]()
        match, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

        def asked(request: Request, num_computed: int) -> tuple[int | None, bool]:
            computed[request.request_id] = num_computed
            return match(request, num_computed)

        def given(request: Request, blocks: Any, external: int) -> None:
            if external > 0:
                first, size = computed[request.request_id], self.shape.block_tokens
                loaded = slice(first // size, -(-(first + external) // size))
                self.own_loads[request.request_id] = {block for table in blocks.get_block_ids() for block in table[loaded]}
            allocated(request, blocks, external)

        connector.get_num_new_matched_tokens, connector.update_state_after_alloc = asked, given

    def _watch_pool(self) -> None:
        """Notes which blocks are given out, for the runner to poison: nobody may read them before they are computed or loaded."""
        pool = self.scheduler.kv_cache_manager.block_pool
        take = pool.get_new_blocks

        def watched(*args: Any, **kwargs: Any) -> Any:
            blocks = take(*args, **kwargs)
            # Ids are unique over all groups: they share one pool, and each layer has a tensor of its own.
            ids = [block.block_id for block in blocks]
            self._fresh += [(group, ids) for group in range(len(self.shape.windows))] if ids else []
            return blocks

        pool.get_new_blocks = watched

    def ask(self, req_id: str, prompt: list[int], max_tokens: int, stop: tuple[int, ...] = (), **params: Any) -> None:
        """Sends a request."""
        self.asked[req_id] = Asked(prompt, max_tokens, list(stop))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=list(stop), extra_args=params or None)
        sampling.update_from_generation_config({}, None)
        request = Request(req_id, prompt, sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)

    def abort(self, req_id: str) -> None:
        """As a client that goes away."""
        self.asked[req_id].aborted = True
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def reset(self) -> bool:
        """vLLM forgets the KV that no request uses."""
        return self.scheduler.reset_prefix_cache()

    def reset_running(self) -> bool:
        """vLLM forgets all KV, that of running requests too; False where it could not, as some is held for stores.

        As for weights that change: steps in flight come to their end first.
        """
        while self.queue:
            self._update()
        try:
            return self.scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError as error:
            assert "Failed to reset KV cache" in str(error)
            return False

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for its load."""
        return any(r.status == RequestStatus.WAITING_FOR_REMOTE_KVS for r in self.scheduler.requests.values())

    def step(self, before_update: Callable[[], None] = lambda: None) -> bool:
        """One call of vLLM's `EngineCore.step`; whether there is more to do. `before_update` is called where vLLM takes aborts: just before
        it looks at a step's output."""
        if not self.scheduler.has_requests() and not self.queue:
            return False
        executed = False
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            fresh, self._fresh = self._fresh, []
            self.steps += 1
            self.preemptions += len(output.preempted_req_ids or ())
            assert not output.kv_cache_block_copies, "partial blocks are copied, which this runner does not do"
            self.queue.append((output, self.runner.execute(output, fresh)))
            executed = output.total_num_scheduled_tokens > 0
            if len(self.queue) < self.shape.steps_ahead and (executed or self.scheduler.has_requests()):
                return True
        before_update()
        self._update()
        if time.monotonic() - self._moved > HANGS_S:
            raise Hangs(f"nothing has happened for {HANGS_S:.0f} s: {self.describe()}")
        if not executed and not self.queue:
            # vLLM does the same, so that threads that move KV get the interpreter.
            time.sleep(0.001)
        return True

    def _update(self) -> None:
        step, outputs = self.queue.popleft()
        output = self.aggregator.aggregate(outputs)
        assert output is not None
        kv = output.kv_connector_output
        self.failed_loads += len(kv.failed_recving) + bool(kv.invalid_block_ids)
        if kv.finished_recving or kv.finished_sending:
            self._moved = time.monotonic()
        for each in self.scheduler.update_from_output(step, output).values():
            for out in each.outputs:
                self._moved = time.monotonic()
                asked = self.asked[out.request_id]
                asked.output += out.new_token_ids
                if out.finish_reason is not None:
                    asked.finished = str(out.finish_reason)
                if asked.finished == "error" and out.finish_reason is not None:
                    self.errors += 1
                    own = self.own_loads.get(out.request_id, set()) & kv.invalid_block_ids
                    is_own = own or out.request_id in kv.failed_recving or not self.runner.strict
                    assert is_own, f"{out.request_id} ends for another request's load"
                if out.kv_transfer_params is not None:
                    self.handed_over[out.request_id] = out.kv_transfer_params
                if out.prefill_stats is not None:
                    self.loaded_tokens += out.prefill_stats.num_external_cached_tokens

    def drain(self) -> None:
        """Steps until nothing is left to do."""
        while self.step():
            pass

    def until_stored(self, prompt: list[int], tokens: int) -> None:
        """Waits until every worker has committed so many tokens of a prompt that was asked before.

        Asks again where stores were shed: they wait half a second for room, and on a slow drive a server's first segment, and what is
        evicted for others, takes longer.
        """
        workers, began, shed = [rank.connector._worker for rank in self.runner.ranks], time.monotonic(), 0
        while True:
            is_storing = any(worker._engine.stats()["active_stores"] for worker in workers)
            there = [worker._engine.lookup(prompt) for worker in workers]
            if min(there) >= tokens:
                return
            before, counts = shed, [worker.stats() for worker in workers]
            assert time.monotonic() - began < HANGS_S, f"of {tokens} tokens the workers have {there}: {counts}"
            if is_storing:
                time.sleep(0.001)
                continue
            shed = sum(of["shed_chunks"] for of in counts)
            assert shed > before, f"of {tokens} tokens the workers have {there}, and nothing was shed: {counts}"
            self.ask(f"again-{len(self.asked)}", prompt, 1)
            self.drain()

    def describe(self) -> str:
        """What is left."""
        left = {
            req_id: (r.status.name, r.num_computed_tokens, r.num_tokens, r.num_output_placeholders)
            for req_id, r in self.scheduler.requests.items()
        }
        return f"steps {self.steps}, requests {left}"

    def check_outputs(self, all_finished: bool = True) -> None:
        """What was generated is right, and all of it is there, but for requests that were aborted."""
        for req_id, asked in self.asked.items():
            right = generated(asked.prompt, asked.max_tokens, asked.stop)
            if asked.finished == "error" and self.shape.policy == "fail":
                right = right[: len(asked.output)]
            elif asked.finished is None and (asked.aborted or not all_finished):
                right = right[: len(asked.output)]
            else:
                assert asked.finished is not None, f"request {req_id} has not finished: {self.describe()}"
            assert asked.output == right, f"request {req_id} generated {asked.output}, right is {right}"

    def check_empty(self) -> None:
        """No request, block or transfer is left behind; to be called when all is drained."""
        assert not self.scheduler.requests, self.describe()
        pool = self.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        assert free == self.shape.blocks - 1, f"{self.shape.blocks - 1 - free} blocks were never freed"
        assert not self.aggregator._recv_remaining_count, "loads that only some workers reported"
        assert not self.aggregator._send_remaining_count, "stores that only some workers reported"

    def close(self) -> None:
        """As a server that is stopped."""
        self.scheduler.shutdown()
        for rank in self.runner.ranks:
            rank.connector.shutdown()
