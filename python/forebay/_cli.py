"""The `forebay` program, as the package's script and as `python -m forebay`."""

from __future__ import annotations

import signal
import sys

from forebay import _forebay


def main() -> None:
    """Runs the program with the command line's arguments and exits with its code."""
    # Ctrl-C ends it as it does any program; Python's own handler would only note it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_forebay.main(["forebay", *sys.argv[1:]]))
