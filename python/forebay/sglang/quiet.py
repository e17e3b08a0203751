"""Warnings that do not fill a log: one a minute of each kind, the others at debug level."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Seconds between two warnings of one kind.
EVERY_S = 60.0


class Quiet:
    """Logs for one of the adapter classes. Usable from any thread."""

    def __init__(self, logger: logging.Logger) -> None:
        """Writes to `logger`."""
        self._logger = logger
        self._last: dict[str, float] = {}
        self._lock = threading.Lock()

    def warn(self, kind: str, message: str, *values: object) -> None:
        """Warns, unless one of this kind was warned of a short time ago."""
        now = time.monotonic()
        with self._lock:
            is_new = now - self._last.get(kind, -EVERY_S) >= EVERY_S
            if is_new:
                self._last[kind] = now
        self._logger.log(logging.WARNING if is_new else logging.DEBUG, message, *values)

    def guarded(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        """What `call` answers; `otherwise`, with a warning, where it raises: a cache must not take a server down with it."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001
            self.warn(f"{what} {type(error).__name__}", "pages could not be %s: %s", what, error)
            return otherwise
