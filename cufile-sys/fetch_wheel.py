#!/usr/bin/env python3
"""Fetches NVIDIA's libcufile from its Python wheels, for tests; nothing of it is built in or shipped.

usage: fetch_wheel.py DIR [--require]

Unpacks a wheel of each version at which the interface changed under DIR, writes the path of the newest libcufile.so.0 to
DIR/libcufile.path and prints it. What is there already is not fetched again. What cannot be fetched is named, and the tests
go on without it; with --require that is a failure.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

# Oldest first. The interface last changed in 1.19; the last entry shows that 1.20 is like it.
REQUIREMENTS = [
    ("nvidia-cufile-cu12", "1.11"),
    ("nvidia-cufile-cu12", "1.13"),
    ("nvidia-cufile-cu12", "1.14"),
    ("nvidia-cufile", "1.15"),
    ("nvidia-cufile", "1.16"),
    ("nvidia-cufile", "1.17"),
    ("nvidia-cufile", "1.19"),
    ("nvidia-cufile", "1.20"),
]
FAILURES = (OSError, ValueError, subprocess.SubprocessError, zipfile.BadZipFile)


def unpacked(directory: pathlib.Path, package: str, version: str) -> pathlib.Path | None:
    """The library of a wheel that lies there already."""
    pattern = f"{package.replace('-', '_')}-{version}.*/**/libcufile.so.0"
    return next((library.resolve() for library in directory.glob(pattern)), None)


def fetch(directory: pathlib.Path, package: str, version: str) -> pathlib.Path:
    directory.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fetch-") as scratch:
        subprocess.run(
            [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", scratch, f"{package}=={version}.*"],
            check=True,
            stdout=sys.stderr,
            timeout=300,
        )
        wheel = next(pathlib.Path(scratch).glob("*.whl"))
        contents = pathlib.Path(scratch, "contents")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(contents)
        contents.rename(directory / re.sub(r"-py3-.*", "", wheel.stem))
    library = unpacked(directory, package, version)
    if library is None:
        raise ValueError(f"the wheel {wheel.name} has no libcufile.so.0")
    return library


def main() -> int:
    arguments = [a for a in sys.argv[1:] if a != "--require"]
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    directory = pathlib.Path(arguments[0])
    libraries, missing = [], []
    for package, version in REQUIREMENTS:
        try:
            libraries.append(unpacked(directory, package, version) or fetch(directory, package, version))
        except FAILURES as error:
            missing.append(version)
            print(f"no libcufile {version}: {error}", file=sys.stderr)
    if missing:
        print(f"SKIPPED: tests with libcufile {', '.join(missing)}, which could not be fetched", file=sys.stderr)
    note = directory / "libcufile.path"
    if libraries:
        note.write_text(f"{libraries[-1]}\n")
        print(libraries[-1])
    else:
        note.unlink(missing_ok=True)
    return 1 if missing and "--require" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
