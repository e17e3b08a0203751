"""What the two halves of the connector send each other; vLLM carries both without looking inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

if TYPE_CHECKING:
    from forebay.vllm.blend.live import Job


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, once per step."""

    step: bytes = b""
    """The state machine's own message; empty where there is nothing to do."""
    preempts: bool = False
    """Whether that message names requests whose blocks are taken away."""
    blends: tuple[Job, ...] = ()
    """Requests that are blended from this step on."""
    held: frozenset[str] = frozenset()
    """Finished requests whose blocks vLLM keeps until every worker has reported them as sent."""
    rests: bool = False
    """The connector's cache was reset: nothing is loaded, stored or blended any more."""


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, once per step and worker."""

    parts: list[bytes] = field(default_factory=list)
    """One message of the state machine per worker."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Both workers' messages."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.parts + other.parts)
