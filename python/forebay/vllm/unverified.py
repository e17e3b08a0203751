"""Loads that run within a step, from that step until the workers have reported how they ended.

With `kv_load_failure_policy: fail` vLLM ends a request whose load failed, emits none of its tokens, and takes its blocks out of its
prefix cache. That alone does not keep others from harm (tests/vllm/harness/test_failed_loads.py): vLLM enters blocks into its prefix
cache before they are loaded, ends every request that shares them, and leaves those of a request that was aborted meanwhile. So until
a load is known to be right, no other request gets its blocks; and the blocks of one that failed are
taken out of the prefix cache, whatever became of its request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class _Load:
    req_id: str
    step: int
    first: int
    """Which of the request's block hashes is the first that is loaded."""
    block_hash: bytes
    blocks: set[int]


class Unverified:
    """The unverified loads of one scheduler."""

    def __init__(self) -> None:
        """No loads yet."""
        self._loads: list[_Load] = []
        self._pool: BlockPool | None = None

    def bind(self, pool: BlockPool) -> None:
        """vLLM's blocks, and its prefix cache over them."""
        self._pool = pool

    def began(self, request: Request, computed: int, blocks: Iterable[int], step: int) -> None:
        """A load that step `step` carries: `computed` tokens are in vLLM's prefix cache already, `blocks` are all of the request."""
        if self._pool is None:
            return
        first = computed // self._pool.hash_block_size
        if first < len(request.block_hashes):
            self._loads.append(_Load(request.request_id, step, first, request.block_hashes[first], set(blocks)))

    def scheduled(self, output: SchedulerOutput) -> None:
        """Adds the blocks that a step gives to requests with such loads: what is computed into them
        depends on the load."""
        cached = output.scheduled_cached_reqs
        for load in self._loads:
            if load.req_id in cached.req_ids:
                for new in cached.new_block_ids[cached.req_ids.index(load.req_id)] or ():
                    load.blocks.update(new)

    def concerns(self, request: Request) -> bool:
        """Whether a request has the same prefix up to a block that is being loaded, so that vLLM would share it."""
        hashes = request.block_hashes
        return any(load.first < len(hashes) and hashes[load.first] == load.block_hash for load in self._loads)

    def ended(self, step: int, failed: Iterable[str]) -> None:
        """The loads of all steps up to this one are over; of these requests some load failed."""
        over = [load for load in self._loads if load.step <= step]
        if not over:
            return
        self._loads = [load for load in self._loads if load.step > step]
        failed = set(failed)
        for load in over:
            if load.req_id in failed and self._pool is not None:
                self._pool.evict_blocks(load.blocks)
