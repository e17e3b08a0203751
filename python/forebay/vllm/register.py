"""The `vllm.general_plugins` entry point: makes the name `ForebayConnector` known to every vLLM process."""

from __future__ import annotations

NAME = "ForebayConnector"


def register() -> None:
    """Registers the connector; vLLM calls this once or more in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "forebay.vllm.connector", NAME)
