"""Notices that SGLang exchanges its weights while it runs, as training does (`update_weights_from_disk` and its like).

SGLang's keys do not tell the KV of old weights from that of new ones, and its flush of the cache does not say why it comes. So from the
first exchange on nothing is found, loaded or stored until a restart, whose namespace is that of the weights it starts with.

Invariant: an exchange is noticed before the first weight changes. Where one before the first `watch` would have gone unnoticed, as with a
cache that is attached to a server that runs, `may_have_missed` says so.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

#: Where SGLang's schedulers put weights into their models. Loaded before the cache is made, if there
#: is a model at all.
MODULE = "sglang.srt.model_executor.model_runner_components.weight_updater"
#: Its class, and the calls that change weights or begin to.
CLASS = "WeightUpdater"
CALLS = (
    "begin_weight_update",
    "receive_weights_from_distributed",
    "load_weights_from_distributed",
    "update_weights_from_disk",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)

_exchanged = threading.Event()
_missed = threading.Event()


class Exchanged(Exception):
    """The weights are not those any more that the namespace is named after."""


def watch(is_start: bool) -> None:
    """Notices exchanges from now on. At the start of a server there was none before."""
    updater = getattr(sys.modules.get(MODULE), CLASS, None)
    for name in CALLS if updater is not None else ():
        call = getattr(updater, name)
        if not hasattr(call, "is_watched_by_forebay"):
            setattr(updater, name, _watched(call))
            if not is_start:
                _missed.set()


def may_have_missed() -> bool:
    """Whether the weights may not be those any more that SGLang was started with."""
    return _missed.is_set()


def require_the_same() -> None:
    """Raises `Exchanged` where the weights have been exchanged since the start."""
    if _exchanged.is_set():
        raise Exchanged("SGLang has exchanged the weights: nothing is loaded or stored until it is restarted")


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def watched(*args: Any, **kwargs: Any) -> Any:
        # With a filter SGLang reads some of the same weights again, for experts that were lost.
        if kwargs.get("weight_name_filter") is None:
            _exchanged.set()
        return call(*args, **kwargs)

    watched.is_watched_by_forebay = True  # type: ignore[attr-defined]
    return watched
