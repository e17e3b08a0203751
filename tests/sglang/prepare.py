"""Makes the virtual environment in which SGLang's cache runs on a CPU, outside the checkout, and prints its Python's path.

It lies over the environment of ../vllm, whose torch it uses. Usage: prepare.py [WHEEL]: with a wheel, a small environment is made over
it in target/ of this checkout, which has that build of forebay.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "vllm"))
import environment as vllm  # noqa: E402  (after its folder is on the path)

PINS, TRITON = HERE / "requirements.txt", HERE / "no_triton.py"


def place() -> Path:
    """Where SGLang's packages lie."""
    seed = PINS.read_bytes() + TRITON.read_bytes() + Path(__file__).read_bytes()
    return vllm.place().parent / f"sglang-{hashlib.sha256(seed).hexdigest()[:16]}"


def make(folder: Path) -> Path:
    """The folder; made first where there is none, and whole where it is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            print(f"making {folder}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as work:
                made = Path(work, "made")
                pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
                vllm.output(*pip, "--target", made, "-r", PINS)
                (made / "triton").mkdir()
                shutil.copy(TRITON, made / "triton" / "__init__.py")
                made.rename(folder)
    return folder


def main() -> None:
    """Prints the path of the environment's Python."""
    base = vllm.make(vllm.place())
    above = make(place())
    wheel = [Path(argument) for argument in sys.argv[1:]]
    print(vllm.over(base, *wheel, name="venv-sglang", more=(above,)))


if __name__ == "__main__":
    main()
