"""Where the `forebay` program lies that the package brings."""

from __future__ import annotations

import sysconfig
from pathlib import Path


def program_path() -> Path | None:
    """The program's file, or None where the package was installed without it."""
    # The usual place; then that of `pip install --target`, whose programs lie beside the packages.
    for folder in (Path(sysconfig.get_path("scripts")), Path(__file__).parents[1] / "bin"):
        if (program := folder / "forebay").is_file():
            return program
    return None
