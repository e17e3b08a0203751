"""A connector whose loads always fail: it promises a prompt's blocks within the step, loads nothing, and says so afterwards.

It shows what vLLM does with a failed synchronous load, whoever's it is. Nothing of Forebay is in it. Requests whose name begins with
`plain` are promised nothing.

It names blocks, or with `"reports": "requests"` in `kv_connector_extra_config` requests, as vLLM asks of a connector where there are
several KV cache groups; with `"over": true` it says with them that their loads are over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class Promised(KVConnectorMetadata):
    """Blocks that this step was to load, and for whom."""

    blocks: set[int] = field(default_factory=set)
    requests: set[str] = field(default_factory=set)


#: In the place of a block that has left a sliding window: every request may have it.
NULL_BLOCK = 0


class RejectingConnector(KVConnectorBase_V1, SupportsHMA):
    """Promises each prompt once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM makes it."""
        super().__init__(*args, **kwargs)
        self._promised: dict[str, int] = {}
        self._blocks: set[int] = set()
        self._requests: set[str] = set()
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._names_requests, self._says_over = extra.get("reports") == "requests", extra.get("over", False)

    @property
    def requires_kv_delivery(self) -> bool:
        """No."""
        return False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """All whole blocks but the last token's, within the step."""
        if request.request_id in self._promised or request.request_id.startswith("plain"):
            return 0, False
        size = self._vllm_config.cache_config.block_size
        tokens = (request.num_prompt_tokens - 1) // size * size - num_computed_tokens
        self._promised[request.request_id] = tokens
        return max(tokens, 0), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """These blocks are not going to be loaded."""
        if num_external_tokens > 0:
            last = request.num_prompt_tokens - 1
            for table in blocks.get_block_ids():
                self._blocks |= set(table[: last // self._vllm_config.cache_config.block_size]) - {NULL_BLOCK}
            self._requests.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Promised:
        """They fail in this step."""
        promised = Promised(self._blocks, self._requests)
        self._blocks, self._requests = set(), set()
        return promised

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keeps nothing."""
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Nothing is ever loaded."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fails."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Fails."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Stores nothing."""

    def wait_for_save(self) -> None:
        """Stores nothing."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Says so of requests."""
        failed = self._promised_now().requests if self._names_requests else set()
        return KVConnectorTransferResults(finished_recving=set(failed) if self._says_over else set(), failed_recving=set(failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Says so of blocks."""
        return set() if self._names_requests else self._promised_now().blocks

    def _promised_now(self) -> Promised:
        meta = self._get_connector_metadata()
        assert isinstance(meta, Promised)
        return meta
