"""Makes the virtual environment in which LMCache's server runs on a CPU, outside the checkout, and prints its Python's path.

It lies over the environment of ../vllm, whose torch it uses. Usage: prepare.py [WHEEL]: with a wheel, a small environment is made over
it in target/ of this checkout, which has that build of forebay. prepare.py --suite: the folder of LMCache's own tests.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "vllm"))
import environment as vllm  # noqa: E402  (after its folder is on the path)

PINS = HERE / "requirements.txt"
#: The tests come with LMCache's source distribution. pip takes one only after it has asked it for its version.
SOURCE = "lmcache==0.5.6"
SUITE = "tests/v1/distributed/test_native_connector_l2_adapter.py"


def place(what: str) -> Path:
    """Where something that is made once lies."""
    digest = hashlib.sha256(PINS.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:16]
    return vllm.place().parent / f"{what}-{digest}"


def once(folder: Path, make) -> Path:
    """The folder; made first where there is none, and whole where it is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            print(f"making {folder}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as work:
                make(Path(work, "made"))
                Path(work, "made").rename(folder)
    return folder


def packages(folder: Path) -> None:
    """Installs the pins into `folder`."""
    vllm.output(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", folder, "-r", PINS)


def suite(folder: Path) -> None:
    """LMCache's tests of its native connector, from its source distribution."""
    with tempfile.TemporaryDirectory() as work:
        tools = Path(work, "tools")
        pip = [sys.executable, "-m", "pip"]
        vllm.output(*pip, "install", "--quiet", "--target", tools, "setuptools<81", "setuptools_scm>=8,<9", "wheel", "packaging", "ninja")
        base = vllm.purelib(vllm.make(vllm.place()))
        # Its setup.py looks for torch, and compiles nothing.
        wanted = {"PYTHONPATH": f"{tools}{os.pathsep}{base}", "NO_CUDA_EXT": "1", "NO_NATIVE_EXT": "1", "SETUPTOOLS_SCM_PRETEND_VERSION": SOURCE.split("==")[1]}
        command = [*pip, "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "lmcache", "--dest", work, SOURCE]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | wanted)
        found = list(Path(work).glob("lmcache-*.tar.gz"))
        if not found:
            sys.exit(f"LMCache's source distribution, which has its tests, could not be fetched:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        folder.mkdir()
        with tarfile.open(found[0]) as source:
            member = next(m for m in source.getmembers() if m.name.endswith(f"/{SUITE}"))
            (folder / Path(SUITE).name).write_bytes(source.extractfile(member).read())


def main() -> None:
    """Prints the path of the environment's Python, or of the tests."""
    if sys.argv[1:] == ["--suite"]:
        print(once(place("lmcache-tests"), suite))
        return
    base = vllm.make(vllm.place())
    above = once(place("lmcache"), packages)
    wheel = [Path(argument) for argument in sys.argv[1:]]
    print(vllm.over(base, *wheel, name="venv-lmcache", more=(above,)))


if __name__ == "__main__":
    main()
