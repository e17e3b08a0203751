"""The engine's log lines where vLLM's are: with its time, level and format, at its level."""

from __future__ import annotations

import logging


def join() -> None:
    """Gives the logger `forebay` what the logger `vllm` has, unless the program has set it up itself."""
    ours, theirs = logging.getLogger("forebay"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = theirs.propagate
