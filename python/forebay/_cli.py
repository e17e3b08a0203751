"""Where the `forebay` program lies that the package brings."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path


def folders() -> list[Path]:
    """Where it may lie: as pip installs it, beside the packages of `pip install --target`, as `pip install --user` does."""
    user = sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))
    return [Path(sysconfig.get_path("scripts")), Path(__file__).parents[1] / "bin", Path(user)]


def program_path() -> Path | None:
    """The program's file, or None where the package was installed without it."""
    # Not `Path.is_file`, which raises where a folder may not be searched.
    return next((program for folder in folders() if os.path.isfile(program := folder / "forebay")), None)
