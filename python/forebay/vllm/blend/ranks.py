"""What tensor-parallel workers agree on, so that all of them run the same passes.

Every worker has its own heads and its own stored segments: one may miss a segment that the others
have. A pass of the model is a collective call of all of them. So whatever decides which pass comes
next is decided here, by all of them and alike.

Invariant: a worker that meets an error which the others may not have met leaves before it calls
anything collective again. Another pass's numbers would be added to its own.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.forebay")


class Ranks:
    """The tensor-parallel workers of this one's model; every method is called by all of them, in
    the same order."""

    def __init__(self) -> None:
        """Of a worker whose vLLM has set up its process groups."""
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        self.rank, self.count = int(group.rank_in_group), int(group.world_size)
        self._group = group.cpu_group

    def all(self, flags: list[bool]) -> list[bool]:
        """Of each, whether it is true on all workers."""
        import torch

        if self.count == 1 or not flags:
            return flags
        both = torch.tensor(flags, dtype=torch.uint8)
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return [bool(flag) for flag in both]

    def total(self, scores: torch.Tensor) -> torch.Tensor:
        """The sum over all workers, the same to the last bit on each: they choose by it."""
        import torch

        if self.count == 1:
            return scores
        parts = [torch.empty_like(scores) for _ in range(self.count)]
        torch.distributed.all_gather(parts, scores, group=self._group)
        return torch.stack(parts).sum(0)

    def leave(self, error: Exception) -> None:
        """Ends this worker's process, and vLLM with it, where the other workers may not have met
        this error. A `ValueError` is for what all of them refuse alike."""
        if self.count > 1 and not isinstance(error, ValueError):
            logger.error("worker %d of %d ends: the others may be in the middle of a pass", self.rank, self.count, exc_info=error)
            raise SystemExit(1) from error
