"""Hands the engine's log lines to `logging`.

The engine's threads only queue lines; the thread here takes them out. It ends before the interpreter does.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading

from forebay import _forebay

_lock = threading.Lock()
_pump: threading.Thread | None = None
_pid = 0


def _level() -> None:
    _forebay._log_level(min(max(logging.getLogger("forebay").getEffectiveLevel(), 5), 50))


def _run() -> None:
    while (line := _forebay._log_next()) is not None:
        level, target, message = line
        logging.getLogger(target).log(level, "%s", message)


def start() -> None:
    """Starts the thread where it does not run, and takes the logger's level as it is now."""
    global _pump, _pid
    _level()
    with _lock:
        if _pump is None:
            _pump, _pid = threading.Thread(target=_run, name="forebay-log", daemon=True), os.getpid()
            _pump.start()
            atexit.register(_end)


def flush() -> None:
    """Waits until every line queued so far has reached its logger; for tests."""
    _end()
    start()


def _end() -> None:
    global _pump
    with _lock:
        if _pump is None or _pid != os.getpid():
            return
        _forebay._log_end()
        _pump.join()
        _pump = None
        atexit.unregister(_end)
