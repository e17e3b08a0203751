"""Warnings that do not fill a log: one a minute of each kind, the others at debug level."""

from __future__ import annotations

import logging
import threading
import time

#: Seconds between two warnings of one kind.
EVERY_S = 60.0


class Quiet:
    """Usable from any thread. Kinds are few: each is remembered."""

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
