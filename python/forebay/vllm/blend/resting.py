"""After a reset of the connector's cache a script blends and stores nothing.

The workers hear of the reset with vLLM's next step, and a script's call may come before that. So it
is refused in the process that has the scheduler, which every call of a worker's method passes.
"""

from __future__ import annotations

import functools
from typing import Any

from forebay.vllm.blend.client import METHODS

WHY = (
    "the connector's cache was reset, and the weights may be others than those that the segments are stored for: nothing is blended or "
    "stored until this server is restarted"
)


@functools.cache
def listen() -> None:
    """Refuses scripts' calls in this process from a reset on."""
    from vllm.v1.engine.core import EngineCore

    call = EngineCore.collective_rpc

    @functools.wraps(call)
    def collective_rpc(core: Any, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if isinstance(method, str) and method.startswith(METHODS) and _rests(core):
            return [{"error": WHY}]
        return call(core, method, *args, **kwargs)

    EngineCore.collective_rpc = collective_rpc  # type: ignore[method-assign]


def _rests(core: Any) -> bool:
    # Another connector around Forebay's has none, and cannot blend.
    half = getattr(core.scheduler.connector, "_scheduler", None)
    return bool(getattr(half, "rests", False))
