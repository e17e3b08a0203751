"""Makes the virtual environment in which LMCache's server runs on a CPU, outside the checkout, and prints its Python's path.

It lies over the environment of ../vllm, whose torch it uses. Usage: prepare.py [--lmcache VERSION] [WHEEL]: with a wheel, a small
environment is made over it in target/ of this checkout, which has that build of forebay. With --suite: the folder of LMCache's own tests.
The folders lie beside that of ../vllm; one that the pins or this file have outgrown may be deleted.
"""

from __future__ import annotations

import argparse
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

#: The versions that are tested, and what each is over the environment of ../vllm. The first is the one of `make lmcache-ci`.
PINS = {
    "0.5.6": ("lmcache==0.5.6", "sortedcontainers==2.4.0"),
    # With what LMCache's own adapters `fs` and `raw_block` need: they are compared with Forebay over this version.
    "0.5.7rc2": ("lmcache==0.5.7rc2", "sortedcontainers==2.4.0", "aiofiles==25.1.0", "lmcache-rust-raw-block-io==0.5.7rc2"),
}
#: SGLang's file backend, for the comparison, and what it imports that vLLM's environment lacks.
SGLANG = ("sglang==0.5.23", "orjson==3.13.0", "triton==3.9.0", "ipython==9.18.1", "traitlets==5.16.1")
#: LMCache's tests come with its source distribution only.
SUITE = ("test_native_connector_l2_adapter.py", "test_mock_l2_adapter.py")


def place(what: str, pins: tuple[str, ...]) -> Path:
    """Where something that is made once lies."""
    digest = hashlib.sha256(repr(pins).encode() + Path(__file__).read_bytes()).hexdigest()[:16]
    return vllm.place().parent / f"{what}-{pins[0].split('==')[1]}-{digest}"


def once(folder: Path, make) -> Path:
    """The folder; made first where there is none, and whole where it is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            print(f"making {folder}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as work:
                make(Path(work, "made"))
                Path(work, "made").rename(folder)
    return folder


def packages(what: str, pins: tuple[str, ...]) -> Path:
    """The folder with these packages and nothing that they depend on."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-cache-dir"]
    return once(place(what, pins), lambda folder: vllm.output(*command, "--target", folder, *pins))


def suite(folder: Path, version: str) -> None:
    """LMCache's tests of its L2 adapters, from its source distribution."""
    with tempfile.TemporaryDirectory() as work:
        tools = Path(work, "tools")
        pip = [sys.executable, "-m", "pip"]
        vllm.output(*pip, "install", "--quiet", "--target", tools, "setuptools<81", "setuptools_scm>=8,<9", "wheel", "packaging", "ninja")
        base = vllm.purelib(vllm.make(vllm.place()))
        # pip takes a source distribution only after it has asked it for its version. Its setup.py looks for torch, and compiles nothing.
        wanted = {"PYTHONPATH": f"{tools}{os.pathsep}{base}", "NO_CUDA_EXT": "1", "NO_NATIVE_EXT": "1", "SETUPTOOLS_SCM_PRETEND_VERSION": version}
        command = [*pip, "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "lmcache", "--dest", work, f"lmcache=={version}"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | wanted)
        found = list(Path(work).glob("lmcache-*.tar.gz"))
        if not found:
            sys.exit(f"LMCache's source distribution, which has its tests, could not be fetched:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        folder.mkdir()
        with tarfile.open(found[0]) as source:
            for member in source.getmembers():
                if (name := Path(member.name)).parent.match("tests/v1/distributed") and name.name in SUITE:
                    (folder / name.name).write_bytes(source.extractfile(member).read())


def main() -> None:
    """Prints the path of the environment's Python, or of the tests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lmcache", choices=PINS, default=next(iter(PINS)))
    parser.add_argument("--suite", action="store_true")
    parser.add_argument("--sglang", action="store_true", help="with SGLang's file backend, for the comparison")
    parser.add_argument("wheel", nargs="*", type=Path)
    given = parser.parse_args()
    if given.suite:
        print(once(place("lmcache-tests", PINS[given.lmcache]), lambda folder: suite(folder, given.lmcache)))
        return
    base = vllm.make(vllm.place())
    above = [packages("lmcache", PINS[given.lmcache])]
    name = f"venv-lmcache-{given.lmcache}"
    if given.sglang:
        above.append(packages("sglang", SGLANG))
        name = "venv-comparison"
    print(vllm.over(base, *given.wheel, name=name, more=tuple(above)))


if __name__ == "__main__":
    main()
