"""Prints the flags that SGLang is started with to keep its KV on local NVMe, after a check of the settings.

    python -m forebay.sglang --cache-dir /mnt/nvme/forebay --capacity 200GiB
    python -m forebay.sglang --linker --cache-dir /mnt/nvme/forebay --capacity 200GiB
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import Any

import forebay
from forebay._drives import drives
from forebay.connector import settings
from forebay.sglang.versions import SGLANGS_KEYS

#: Settings that have flags of their own, by all of their names.
PLACES = ("cache_dir", "drives", "gds_path", "capacity")


def _as_json(text: str) -> Any:
    """A number as a number, for SGLang takes no text for it; what is not JSON as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def flags(given: dict[str, Any], page_size: int, is_linker: bool = False) -> list[str]:
    """SGLang's flags for these settings: of HiCache, or of the external linker."""
    pages = ["--page-size", str(page_size)]
    if is_linker:
        config = {"linker": "Linker", "linker_module_path": "forebay.sglang", "linker_extra_config": given}
        return [
            *pages,
            "--enable-unified-cache-external-linker",
            "--unified-cache-external-linker-backend",
            "dynamic",
            "--unified-cache-external-linker-config",
            json.dumps(config),
        ]
    extra = {"backend_name": "forebay", "module_path": "forebay.sglang", "class_name": "HiCache", "interface_v1": 1, **given}
    return [
        *pages,
        "--enable-hierarchical-cache",
        "--hicache-mem-layout",
        "page_first",
        "--hicache-storage-backend",
        "dynamic",
        "--hicache-storage-backend-extra-config",
        json.dumps(extra),
    ]


def main(arguments: list[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m forebay.sglang", description="Prints the flags to start SGLang with.")
    parser.add_argument("--cache-dir", required=True, help="a directory on a local drive, or one for each drive, separated by commas; the server makes them where they are missing")
    parser.add_argument("--capacity", help="bytes that it may take, such as 200GiB")
    parser.add_argument("--page-size", type=int, default=64, metavar="N", help="tokens of a page (%(default)s; SGLang's own default is 1)")
    parser.add_argument("--linker", action="store_true", help="layer by layer into GPU memory, instead of through HiCache's host memory")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting, or namespace, fingerprint")
    asked = parser.parse_args(arguments)
    if asked.page_size < 1:
        parser.error(f"--page-size {asked.page_size}: a page has at least one token")
    try:
        folders = drives(asked.cache_dir)
    except ValueError as error:
        parser.error(str(error))
    given: dict[str, Any] = {"cache_dir": ",".join(map(str, folders))}
    if asked.capacity:
        given["capacity"] = asked.capacity
    for item in asked.set:
        key, equals, value = item.partition("=")
        if not equals:
            parser.error(f"--set {item}: write KEY=VALUE")
        if key in PLACES:
            parser.error(f"--set {item}: give --cache-dir, or --capacity")
        given[key] = _as_json(value) if key in SGLANGS_KEYS else value
    if given.get("interface_v1", 1) not in (0, 1):
        parser.error(f"--set interface_v1={given['interface_v1']}: write 1 or 0, SGLang takes any text for a yes")
    if asked.linker and "chunk_size" in given:
        parser.error("--set chunk_size: a chunk is a page of SGLang's; leave it out, and give --page-size")
    # The linker's extra config has none of SGLang's keys.
    theirs = () if asked.linker else SGLANGS_KEYS
    try:
        ours = {key: value for key, value in given.items() if key not in ("namespace", "fingerprint", *theirs)}
        resolved = settings(ours, name="the settings given")
    except forebay.ForebayError as error:
        print(f"python -m forebay.sglang: {error}", file=sys.stderr)
        return 1
    if asked.linker and resolved["mode"] == "ro":
        parser.error("mode: ro with --linker: a damaged page stays, so every request that needs it would end with an error; set mode: rw")
    for folder in folders:
        if not (folder if folder.exists() else folder.parent).is_dir():
            print(f"python -m forebay.sglang: {folder} is no directory, and cannot be made; name one on a local drive", file=sys.stderr)
            return 1
    print(" ".join(shlex.quote(flag) for flag in flags(given, asked.page_size, asked.linker)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
