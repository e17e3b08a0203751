"""Hands the engine's log lines to `logging`.

The engine's threads only queue lines; the thread here takes them out. It ends before the interpreter does.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import traceback

from forebay import _forebay

_lock = threading.Lock()
_pump: threading.Thread | None = None


def _forked() -> None:
    global _lock, _pump
    _lock, _pump = threading.Lock(), None


os.register_at_fork(after_in_child=_forked)


def _level() -> None:
    _forebay._log_level(min(max(logging.getLogger("forebay").getEffectiveLevel(), 5), 50))


def _run() -> None:
    while (line := _forebay._log_next()) is not None:
        level, target, message = line
        try:
            logging.getLogger(target).log(level, "%s", message)
        except Exception:  # Of a filter or handler: without this thread no line comes any more.
            traceback.print_exc()


def start() -> None:
    """Starts the thread where it does not run, and takes the logger's level as it is now."""
    global _pump
    _level()
    with _lock:
        if _pump is None:
            _pump = threading.Thread(target=_run, name="forebay-log", daemon=True)
            _pump.start()
            atexit.register(_end)


def flush() -> None:
    """Waits until every line queued so far has reached its logger; for tests."""
    _end()
    start()


def _end() -> None:
    global _pump
    with _lock:
        if _pump is None:
            return
        _forebay._log_end()
        _pump.join()
        _pump = None
        atexit.unregister(_end)
