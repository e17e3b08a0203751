"""What is checked or set once when the connector starts, before a wrong answer is possible."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from forebay.vllm.geometry import Shape, Unsupported
from forebay.vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.forebay")


def recompute_policy(vllm_config: VllmConfig) -> None:
    """A failed load is a miss: vLLM recomputes, where its own default fails the request.

    vLLM's scheduler reads the policy after it has made its connector. Inside MultiConnector only a copy is in reach, so the
    outer configuration must say it; where it is in reach and does not, the start is refused.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    outer = _outer(vllm_config)
    if outer == "fail":
        raise Unsupported(
            "kv_load_failure_policy of MultiConnector is fail: a damaged cache file would fail requests; "
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    if transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            "kv_load_failure_policy was %s, is now recompute: what cannot be loaded is computed",
            transfer.kv_load_failure_policy,
        )
        transfer.kv_load_failure_policy = "recompute"


def _outer(vllm_config: VllmConfig) -> str | None:
    from vllm.config import get_current_vllm_config_or_none

    current = get_current_vllm_config_or_none()
    transfer = None if current is None else current.kv_transfer_config
    if transfer is None or transfer is vllm_config.kv_transfer_config or transfer.kv_connector != "MultiConnector":
        return None
    return transfer.kv_load_failure_policy


def layerwise(vllm_config: VllmConfig, kv: Shape, settings: Settings) -> None:
    """Refuses layer-wise loads where vLLM cannot recover from one that fails."""
    if not settings.layerwise:
        return
    if vllm_config.scheduler_config.async_scheduling:
        raise Unsupported(
            "use_layerwise with asynchronous scheduling: after a failed load vLLM emits a token of the step in flight and then "
            "waits forever for the last one; start with --no-async-scheduling, or leave use_layerwise off"
        )
    if kv.ranks.pp > 1:
        raise Unsupported(
            "use_layerwise with pipeline parallelism: the next step may be under way before vLLM knows of a failed load; leave "
            "use_layerwise off"
        )
    if len(kv.block_tokens) > 1:
        raise Unsupported(
            "use_layerwise with several KV cache groups: a failed load cannot be reported to vLLM; start with "
            "--disable-hybrid-kv-cache-manager, or leave use_layerwise off"
        )
    if any(window is not None for window in kv.windows):
        raise Unsupported(
            "use_layerwise with a sliding window: after a failed load vLLM goes back to tokens whose window it has given away; start "
            "with --disable-hybrid-kv-cache-manager where other layers have none, or leave use_layerwise off"
        )
    if vllm_config.cache_config.enable_prefix_caching:
        raise Unsupported(
            "use_layerwise with prefix caching: after a failed load vLLM lets other requests use its blocks before they are "
            "computed anew; start with --no-enable-prefix-caching, or leave use_layerwise off"
        )
