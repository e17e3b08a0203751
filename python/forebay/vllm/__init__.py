"""The vLLM connector. Importing this package imports neither vLLM nor torch; `ForebayConnector` is resolved on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.vllm.connector import ForebayConnector as ForebayConnector

__all__ = ["ForebayConnector"]


def __getattr__(name: str) -> Any:
    """`ForebayConnector`, for `kv_connector_module_path: forebay.vllm`."""
    if name == "ForebayConnector":
        from forebay.vllm.connector import ForebayConnector

        return ForebayConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
