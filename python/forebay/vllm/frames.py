"""Configurations that vLLM does not hand to whom it makes, from the constructors that are running."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def configs() -> list[VllmConfig]:
    """The `VllmConfig` of each caller that has one, the innermost first."""
    from vllm.config import VllmConfig

    found, frame = [], sys._getframe(1)
    while frame is not None:
        named = (frame.f_locals.get(name) for name in ("vllm_config", "config"))
        found += [config for config in named if isinstance(config, VllmConfig)]
        frame = frame.f_back
    return found
