"""Blends of running requests, in vLLM's workers: a job comes with a step's metadata and ends in the
request's own blocks.

A job is computed in memory of its own, behind the forward passes of the server's steps. When it is
over its blocks are copied into those that vLLM gave the request, and the request is reported as
loaded, like any other that the connector loads between steps.

Invariants:
- In one step no more rows are computed than vLLM's own step may have (`max_num_batched_tokens`),
  whatever the jobs are.
- A job that fails writes no block and is reported as a failed load: vLLM then computes the request.
- All tensor-parallel workers do the same passes in the same step, and a job fails on all of them.
- Every job is reported exactly once, also where its request was aborted: vLLM keeps the blocks
  until then.
- No step waits for a drive: the job goes on in a later one.
- Once the weights may have changed nothing is blended or stored any more: see `rest`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay._quiet import Quiet
from forebay.vllm.blend.blender import Asked, Blender

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay.vllm.blend.blender import Connector
    from forebay.vllm.blend.nested import Steps

logger = logging.getLogger("vllm.forebay")


@dataclass(frozen=True)
class Job:
    """What the scheduler's half asks for."""

    req_id: str
    asked: Asked
    covered: int
    """Tokens from the start that are blended."""
    first: int
    """Which of the prompt's blocks is the first to write; vLLM has those before it."""
    blocks: list[int]
    """The server's blocks that are written, from number `first` on."""
    stores: bool
    """Segments that are missing are computed and stored first."""


class Unusable(ValueError):
    """No segment could be reused; the text is the cause, a word for the counters."""


class Live:
    """The jobs of one worker, one after the other."""

    def __init__(self, runner: Any, connector: Connector, select: str, check_layers: list[int]) -> None:
        """`geometry.Unsupported` where this server cannot blend, `ValueError` where these defaults
        make no sense for its model."""
        self._blender = Blender(runner, connector)
        self._blender.check_layers(select, check_layers)
        self._most_rows = int(runner.vllm_config.scheduler_config.max_num_batched_tokens)
        self._waiting: deque[Job] = deque()
        self._under_way: tuple[Job, Steps[None]] | None = None
        # Rows that the next step of the job under way computes; 0 where it waits for a drive.
        self._next = 0
        self._over: set[str] = set()
        self._failed: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._rests = False
        self._quiet = Quiet(logger)

    def add(self, jobs: Iterable[Job]) -> None:
        """Queues the jobs of a step."""
        self._waiting.extend(jobs)
        if self._rests:
            self._fail_all()

    def rest(self) -> None:
        """The connector's cache was reset: all jobs fail from now on, those under way too. Stored
        segments are those of the old weights, and new ones would be stored as if they were."""
        self._rests = True
        self._fail_all()

    def _fail_all(self) -> None:
        if self._under_way is not None:
            job, steps = self._under_way
            steps.close()
            self._under_way = None
            self._waiting.appendleft(job)
        while self._waiting:
            job = self._waiting.popleft()
            self._fail(job, "reset")
            self._over.add(job.req_id)

    def advance(self) -> None:
        """Computes as many rows of jobs as one step may have."""
        left = self._most_rows
        while self._under_way is not None or self._waiting:
            if self._under_way is None:
                job = self._waiting.popleft()
                self._under_way = (job, self._steps(job))
                if not self._resume():
                    return
            elif self._next > left:
                return
            else:
                left -= self._next
                if not self._resume():
                    return

    def _resume(self) -> bool:
        """Goes on with the job under way, up to its next step; False where that step waits for a
        drive."""
        assert self._under_way is not None
        job, steps = self._under_way
        try:
            self._next = next(steps)
            return self._next > 0
        except StopIteration:
            self._count("requests")
        except Unusable as why:
            self._fail(job, str(why))
        except Exception as error:
            self._blender.ranks.leave(error)
            logger.exception("request %s could not be blended and is computed", job.req_id)
            self._fail(job, "error")
        self._over.add(job.req_id)
        self._under_way = None
        return True

    def _fail(self, job: Job, why: str) -> None:
        self._failed.add(job.req_id)
        self._count(f"computed_{why}")

    def _steps(self, job: Job) -> Steps[None]:
        asked, blender = job.asked, self._blender
        blender.check_layers(asked.select, asked.check_layers)
        chains = blender.chains_of(asked)
        if job.stores:
            for length, why in (yield from blender.storing(chains)):
                self._count("segments_stored" if why is None else "segments_not_stored")
                if why is not None:
                    self._quiet.warn("not stored", "a segment of %d tokens was not stored: %s", length, why)
        found = blender.has(chains)
        if not any(found):
            raise Unusable("missing")
        mixed = yield from blender.mixing(asked, chains, found, blender.limit_ms)
        for state in mixed.states:
            self._count(f"segments_{state}")
        if not mixed.reused:
            raise Unusable(mixed.states[0])
        chosen = yield from blender.blending(asked, mixed, job.covered)
        blender.copy_to(job.blocks, job.first)
        reused = sum(min(end, job.covered) - start for start, end in mixed.reused if start < job.covered)
        self._count("tokens_reused", reused - len(chosen))
        self._count("tokens_recomputed", len(chosen))

    def results(self, finished: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose jobs are over, and those of them that failed; jobs of `finished` requests
        are given up."""
        gone = {job.req_id for job in self._waiting if job.req_id in finished}
        self._waiting = deque(job for job in self._waiting if job.req_id not in gone)
        if self._under_way is not None and self._under_way[0].req_id in finished:
            gone.add(self._under_way[0].req_id)
            self._under_way = None
        self._count("aborted", len(gone))
        over, failed = self._over | gone, self._failed
        self._over, self._failed = set(), set()
        return over, failed

    def _count(self, what: str, by: int = 1) -> None:
        self._counts[f"blend_{what}"] += by

    def counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        grown, self._counts = {name: count for name, count in self._counts.items() if count}, Counter()
        # All workers count the same, and vLLM adds up their counts.
        return grown if self._blender.ranks.rank == 0 else {}

    def close(self) -> None:
        """Closes the namespace of segments."""
        self._blender.close()
