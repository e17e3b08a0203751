"""The `vllm.general_plugins` entry point: makes the connector's and the tier's names known to every vLLM process."""

from __future__ import annotations

NAME = "ForebayConnector"
TIER = "forebay"


def register() -> None:
    """Registers the connector and the tier; vLLM calls this once or more in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "forebay.vllm.connector", NAME)
    _register_tier()


def _register_tier() -> None:
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:
        # A vLLM without tiers; the connector does not need them.
        return
    if TIER not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(TIER, "forebay.vllm.tier", "ForebayTier")
