"""A model runner without a model: it reads and checks all KV that attention would read, and writes the KV that is right.

It calls the workers' connectors in the order of vLLM's own runners and keeps the state of requests as they do. A request that reads
wrong KV is computed wrongly from there on, as by a model: allowed only where a worker has reported one of its blocks as not loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from .kv import FIRST_TOKEN, POISON, VOCABULARY, Prefix

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.output import SchedulerOutput


class WrongKv(AssertionError):
    """KV was read that is not what this request's tokens give."""


@dataclass(frozen=True)
class Layer:
    """One layer."""

    name: str
    group: int
    """KV cache group."""
    window: int | None
    """Tokens that attention reads, the computed one among them; all where None."""
    number: int
    """Which layer of the model it is."""


@dataclass
class Sequence:
    """A request as the runner knows it."""

    req_id: str
    prefix: Prefix
    prompt_tokens: int
    blocks: list[list[int]]
    """One table per KV cache group."""
    computed: int = 0
    wrong: bool = False
    """It has read wrong KV in this step."""

    def outputs(self, count: int) -> None:
        """Drops generated tokens behind the first `count`."""
        self.prefix.truncate(self.prompt_tokens + count)


@dataclass(frozen=True)
class Mismatch:
    """Where wrong KV was read."""

    req_id: str
    rank: int
    layer: str
    position: int
    block: int
    computed: int
    is_poison: bool

    def __str__(self) -> str:
        """All of it."""
        what = "never written" if self.is_poison else "another's or damaged"
        return (
            f"request {self.req_id}, rank {self.rank}, layer {self.layer}, position {self.position} of {self.computed} "
            f"computed before, block {self.block}: {what}"
        )


@dataclass(frozen=True)
class Share:
    """Which tokens' KV a rank has: runs of `interleave` tokens go round `ranks` ranks, as vLLM's block tables have it."""

    rank: int = 0
    ranks: int = 1
    interleave: int = 1

    def own(self, start: int, stop: int, block_tokens: int) -> torch.Tensor:
        """The positions in `start..stop` that are this rank's, with blocks of so many tokens on each rank."""
        positions = torch.arange(start, stop)
        if self.ranks == 1:
            return positions
        return positions[positions % (block_tokens * self.ranks) // self.interleave % self.ranks == self.rank]

    def places(self, positions: torch.Tensor, block_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where in a request's block table positions lie, and where in the blocks."""
        size = block_tokens * self.ranks
        within = positions % size
        rounds = within // (self.interleave * self.ranks)
        return positions // size, rounds * self.interleave + within % self.interleave


class Rank:
    """One worker: its KV tensors and its connector."""

    def __init__(
        self,
        rank: int,
        layers: list[Layer],
        tensors: dict[str, torch.Tensor],
        connector: KVConnectorBase_V1,
        computes_as: int,
        share: Share,
    ) -> None:
        """`tensors`: [blocks, 2, tokens of a block, heads, head size] of 4-byte elements, per layer; `computes_as`: the rank whose
        KV this one computes."""
        self.rank, self.layers, self.connector, self.computes_as = rank, layers, connector, computes_as
        self.share = share
        some = next(iter(tensors.values()))
        self.device, self.block_tokens = some.device, some.shape[2]
        self.words = some.shape[3] * some.shape[4] // 2
        # A token's words of K and of V: [blocks, 2, tokens, words].
        self._kv = {name: t.view(torch.int64).flatten(3) for name, t in tensors.items()}
        connector.register_kv_caches(tensors)

    def poison(self, group: int, blocks: list[int]) -> None:
        """Overwrites blocks."""
        at = torch.tensor(blocks, device=self.device)
        for layer in self.layers:
            if layer.group == group:
                self._kv[layer.name][at] = POISON

    def flip(self, layer: str, block: int) -> None:
        """Damages a block in one place."""
        self._kv[layer][block, 1, 3, 0] ^= 1

    def _right(self, layer: Layer, sequence: Sequence, start: int, positions: torch.Tensor) -> torch.Tensor:
        stop = int(positions[-1]) + 1
        words = sequence.prefix.words(start, stop, (layer.number, self.computes_as), 2 * self.words)
        right = torch.from_numpy(words).to(self.device, non_blocking=True).view(-1, 2, self.words)
        return right if len(right) == len(positions) else right[(positions - start).to(self.device)]

    def write(self, index: int, sequence: Sequence, count: int) -> None:
        """Writes the KV of the next `count` positions in layer `index`; poison where a layer before it has read wrong KV."""
        layer, start = self.layers[index], sequence.computed
        positions = self.share.own(start, start + count, self.block_tokens)
        if len(positions) == 0:
            return
        blocks, places = self._where(layer, sequence, positions)
        assert int(blocks.min()) > 0, f"{sequence.req_id} computes into the null block"
        right = self._right(layer, sequence, start, positions)
        self._kv[layer.name][blocks, :, places] = torch.full_like(right, POISON) if sequence.wrong else right

    def check(self, index: int, sequence: Sequence, count: int) -> Mismatch | None:
        """The first wrong word that attention reads in layer `index` for the next `count` positions."""
        layer = self.layers[index]
        start = 0 if layer.window is None else max(0, sequence.computed + 1 - layer.window)
        positions = self.share.own(start, sequence.computed + count, self.block_tokens)
        if len(positions) == 0:
            return None
        blocks, places = self._where(layer, sequence, positions)
        read = self._kv[layer.name][blocks, :, places]
        differs = (read != self._right(layer, sequence, start, positions)).flatten(1).any(1)
        if not bool(differs.any()):
            return None
        at = int(differs.int().argmax())
        is_poison = bool((read[at] == POISON).all())
        position, block = int(positions[at]), int(blocks[at])
        return Mismatch(sequence.req_id, self.rank, layer.name, position, block, sequence.computed, is_poison)

    def _where(self, layer: Layer, sequence: Sequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_table, places = self.share.places(positions, self.block_tokens)
        table = torch.tensor(sequence.blocks[layer.group])
        return table[of_table].to(self.device), places.to(self.device)


@dataclass
class Runner:
    """All workers; they run one after the other, with the same requests."""

    ranks: list[Rank]
    asynchronous: bool
    """Whether steps are scheduled before their predecessors' outputs are known."""
    second: bool
    """Whether it plays vLLM's second model runner, to which a resumed request comes as a new one."""
    sequences: dict[str, Sequence] = field(default_factory=dict)
    batch: set[str] = field(default_factory=set)
    """Requests of the step before."""
    strict: bool = True
    """Whether wrong KV fails the run; otherwise it is only collected."""
    asks_first: bool = False
    """Whether it asks what has ended before it ends the step, as vLLM's runners do with speculative decoding."""
    excused: int = 0
    """Wrong reads in steps whose load was reported as failed."""
    wrong: list[Mismatch] = field(default_factory=list)
    """Wrong reads in other steps."""
    fails: bool = False
    """Whether vLLM ends a request whose load failed: until it knows, the request goes on to read what was never loaded."""
    doomed: set[str] = field(default_factory=set)
    """Requests that read what was never loaded, with `fails`, until they end or begin anew."""

    def execute(self, step: SchedulerOutput, fresh: list[tuple[int, list[int]]]) -> list[ModelRunnerOutput]:
        """Runs a step; `fresh`: blocks that were taken from the pool for it, per group. One output per worker."""
        meta = step.kv_connector_metadata
        assert meta is not None
        for rank in self.ranks:
            rank.connector.handle_preemptions(meta)
        self._update(step)
        for rank in self.ranks:
            for group, blocks in fresh:
                rank.poison(group, blocks)
            rank.connector.bind_connector_metadata(meta)
        batch = [(self.sequences[req_id], count) for req_id, count in step.num_scheduled_tokens.items()]
        for sequence, count in batch:
            missing = sequence.computed + count - len(sequence.prefix)
            assert missing <= 0 or not self.strict, f"{sequence.req_id} is to compute {missing} tokens that it has not"
            # A real runner reads what its buffers happen to hold.
            sequence.prefix.extend([FIRST_TOKEN] * missing)
            sequence.wrong = False
        wrong: list[Mismatch] = []
        outputs: list[KVConnectorOutput] = []
        for rank in self.ranks:
            if step.has_sync_kv_loads:
                rank.connector.start_load_kv(None)
            wrong += self._forward(rank, batch)
            if not step.has_sync_kv_loads:
                rank.connector.start_load_kv(None)
            outputs.append(self._finish(rank, step))
        self._excuse(wrong, set().union(*(o.invalid_block_ids for o in outputs)))
        sampled = [self._sample(sequence, count) for sequence, count in batch]
        req_ids = [sequence.req_id for sequence, _ in batch]
        index = {req_id: i for i, req_id in enumerate(req_ids)}
        return [
            ModelRunnerOutput(
                req_ids=req_ids, req_id_to_index=index, sampled_token_ids=[list(s) for s in sampled], kv_connector_output=o
            )
            for o in outputs
        ]

    def _forward(self, rank: Rank, batch: list[tuple[Sequence, int]]) -> list[Mismatch]:
        found: list[Mismatch] = []
        if not batch:
            return found
        for index, layer in enumerate(rank.layers):
            rank.connector.wait_for_layer_load(layer.name)
            for sequence, count in batch:
                rank.write(index, sequence, count)
            for sequence, count in batch:
                mismatch = None if sequence.wrong else rank.check(index, sequence, count)
                if mismatch is not None:
                    sequence.wrong = True
                    found.append(mismatch)
            rank.connector.save_kv_layer(layer.name, None, None)
        return found

    def _finish(self, rank: Rank, step: SchedulerOutput) -> KVConnectorOutput:
        connector, output = rank.connector, KVConnectorOutput()
        if not self.asks_first:
            connector.wait_for_save()
        results = connector.get_transfer_results(step.finished_req_ids)
        output.finished_sending = results.finished_sending or None
        output.finished_recving = results.finished_recving or None
        output.failed_recving = results.failed_recving
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        if self.asks_first:
            connector.wait_for_save()
        connector.clear_connector_metadata()
        return output

    def _excuse(self, wrong: list[Mismatch], invalid: set[int]) -> None:
        for mismatch in wrong:
            sequence = self.sequences[mismatch.req_id]
            computed = -(-sequence.computed // (self.ranks[0].block_tokens * self.ranks[0].share.ranks))
            if any(invalid.intersection(table[:computed]) for table in sequence.blocks):
                self.excused += 1
                if self.fails:
                    self.doomed.add(mismatch.req_id)
            elif mismatch.req_id in self.doomed:
                self.excused += 1
            elif self.strict:
                raise WrongKv(str(mismatch))
            else:
                self.wrong.append(mismatch)

    def _sample(self, sequence: Sequence, count: int) -> list[int]:
        sequence.computed += count
        if sequence.computed < len(sequence.prefix):
            return []
        token = sequence.prefix.next_token()
        if sequence.wrong:
            token = FIRST_TOKEN + (token - FIRST_TOKEN + 1) % (VOCABULARY - FIRST_TOKEN)
        sequence.prefix.extend([token])
        return [token]

    def _update(self, step: SchedulerOutput) -> None:
        """What vLLM's runners do in `_update_states`."""
        for req_id in step.finished_req_ids:
            self.sequences.pop(req_id, None)
            self.batch.discard(req_id)
        # What begins anew reads what it has computed or loaded since.
        self.doomed.difference_update(
            step.finished_req_ids, step.scheduled_cached_reqs.resumed_req_ids, (r.req_id for r in step.scheduled_new_reqs)
        )
        cached = step.scheduled_cached_reqs
        self.batch &= step.num_scheduled_tokens.keys() - cached.resumed_req_ids
        for new in step.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            tokens = new.prefill_token_ids if self.second else new.prompt_token_ids
            blocks = [list(table) for table in new.block_ids]
            self.sequences[new.req_id] = Sequence(
                new.req_id, Prefix(tokens or ()), len(new.prompt_token_ids), blocks, new.num_computed_tokens
            )
        for i, req_id in enumerate(cached.req_ids):
            sequence = self.sequences[req_id]
            sequence.computed = cached.num_computed_tokens[i]
            outputs = cached.num_output_tokens[i]
            if sequence.prompt_tokens + outputs < len(sequence.prefix):
                sequence.outputs(outputs)
            self._blocks(sequence, cached.new_block_ids[i], req_id in cached.resumed_req_ids)
            if req_id not in self.batch and not self.second and self.asynchronous and outputs > 0:
                tokens = sequence.prefix.tokens[: sequence.prompt_tokens]
                sequence.prefix.set(tokens + cached.all_token_ids[req_id][-outputs:])
        self.batch = set(step.num_scheduled_tokens)

    @staticmethod
    def _blocks(sequence: Sequence, new: Any, resumed: bool) -> None:
        if resumed:
            sequence.blocks = [list(table) for table in new]
        elif new is not None:
            for table, more in zip(sequence.blocks, new):
                table.extend(more)
