"""Calls whose failure must not reach SGLang, and goes to the log instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from forebay._quiet import Quiet

T = TypeVar("T")


class Guard(Quiet):
    """For one of the adapter classes. Usable from any thread."""

    def guarded(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        """What `call` answers; `otherwise`, with a warning, where it raises: a cache must not take a server down with it."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001
            self.warn(f"{what} {type(error).__name__}", "pages could not be %s: %s", what, error)
            return otherwise
