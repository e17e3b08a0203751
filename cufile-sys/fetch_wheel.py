#!/usr/bin/env python3
"""Fetches NVIDIA's libcufile from its Python wheel, for tests; nothing of it is built in or shipped.

usage: fetch_wheel.py DIR [--require]

Unpacks the wheel `nvidia-cufile` under DIR, writes the path of libcufile.so.0 to DIR/libcufile.path and prints it. What is
there already is not fetched again. Where nothing can be fetched it says so and succeeds, so that tests go on without the
library, unless --require is given.
"""

import pathlib
import subprocess
import sys
import zipfile

REQUIREMENT = "nvidia-cufile>=1.16"


def fetch(directory: pathlib.Path) -> pathlib.Path:
    directory.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(directory), REQUIREMENT],
        check=True,
        stdout=sys.stderr,
        timeout=300,
    )
    wheel = max(directory.glob("nvidia_cufile-*.whl"), key=lambda p: p.stat().st_mtime)
    unpacked = directory / wheel.stem
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    return next(unpacked.glob("**/libcufile.so.0")).resolve()


def main() -> int:
    arguments = [a for a in sys.argv[1:] if a != "--require"]
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    directory = pathlib.Path(arguments[0])
    note = directory / "libcufile.path"
    if note.is_file() and pathlib.Path(note.read_text().strip()).is_file():
        print(note.read_text().strip())
        return 0
    try:
        library = fetch(directory)
    except (OSError, ValueError, StopIteration, subprocess.SubprocessError, zipfile.BadZipFile) as error:
        note.unlink(missing_ok=True)
        print(f"no libcufile: {error}; tests go on without it", file=sys.stderr)
        return 1 if "--require" in sys.argv else 0
    note.write_text(f"{library}\n")
    print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
