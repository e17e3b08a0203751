"""What the `--cache-dir` of the package's programs names."""

from __future__ import annotations

from pathlib import Path


def drives(text: str) -> list[Path]:
    """The directories, absolute: one for each drive, separated by commas. `ValueError` where a name is missing."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError(f"--cache-dir {text!r} has a name missing; give a directory for each drive, separated by commas")
    return [Path(name).absolute() for name in names]
