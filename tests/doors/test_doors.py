"""vLLM, LMCache and SGLang on one cache directory at once, each in its own environment and by its own code: none loses or removes what is
another's. `PYTHON_OF_VLLM` and the like name the environments' Pythons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
STACKS = ("vllm", "lmcache", "sglang")
#: What is in the names by which `ls` and `purge` know them.
MARKS = {"vllm": "/model", "lmcache": "lmcache/kv-of-lmcache", "sglang": "sglang/kv-of-sglang"}


class Door:
    """A process that has the directory open."""

    def __init__(self, stack: str, cache: Path) -> None:
        python = os.environ[f"PYTHON_OF_{stack.upper()}"]
        self._process = subprocess.Popen(
            [python, HERE / "door.py", stack, cache], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._process.communicate(timeout=120)
        assert self._process.returncode == 0


def opened(cache: Path, stacks: tuple[str, ...] = STACKS) -> dict[str, Door]:
    """All at once."""
    doors = {stack: Door(stack, cache) for stack in stacks}
    for stack, door in doors.items():
        assert door.hear() == "open", stack
    return doors


def told(doors: dict[str, Door], command: str) -> dict[str, dict[str, int]]:
    """What each answers; all of them are at work at the same time."""
    for door in doors.values():
        door.say(command)
    return {stack: json.loads(door.hear()) for stack, door in doors.items()}


def found(doors: dict[str, Door]) -> dict[str, bool]:
    """Whether each finds all that is its own; what is found must be right."""
    answers = told(doors, "check")
    for stack, answer in answers.items():
        assert answer["right"] == answer["found"] and answer["found"] in (0, answer["values"]), (stack, answer)
    return {stack: answer["found"] > 0 for stack, answer in answers.items()}


def forebay(*arguments: Any) -> Any:
    """What the program says, as JSON."""
    program = Path(sys.executable).parent / "forebay"
    return json.loads(subprocess.run([program, *map(str, arguments), "--json"], check=True, stdout=subprocess.PIPE).stdout)


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[dict[str, Door]]:
    """The three, over an empty directory."""
    (tmp_path / "cache").mkdir()
    made = opened(tmp_path / "cache")
    yield made
    for door in made.values():
        door.kill()


def purge(cache: Path, name: str) -> None:
    forebay("purge", cache, "--namespace", name, "--yes")


def names(cache: Path) -> dict[str, str]:
    """The model, or the object store's namespace, by which `ls` shows each one's."""
    found = [each["model"] for each in forebay("ls", cache, "--namespaces")]
    return {stack: next(name for name in found if mark in name) for stack, mark in MARKS.items()}


def test_three_servers_share_a_directory_and_no_value(doors: dict[str, Door], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert found(doors) == dict.fromkeys(STACKS, False)
    stored = told(doors, "store")
    assert [stored[stack]["found"] for stack in ("lmcache", "sglang")] == [24, 12]
    assert found(doors) == dict.fromkeys(STACKS, True)
    # What operators see of each: how many values `ls` lists, of vLLM's for each rank.
    listed = forebay("ls", cache, "--namespaces")
    chunks = {stack: [each["chunks"] for each in listed if mark in each["model"]] for stack, mark in MARKS.items()}
    assert chunks == {"vllm": [40, 40], "lmcache": [24], "sglang": [12]}

    # A server that is killed, and what it stored is there when it starts again; the others go on.
    doors["sglang"].kill()
    assert found({stack: doors[stack] for stack in ("vllm", "lmcache")}) == {"vllm": True, "lmcache": True}
    doors |= opened(cache, ("sglang",))
    assert found(doors) == dict.fromkeys(STACKS, True)

    # What is purged is gone for its own server, and for no other one. (vLLM then stores it again.)
    left = dict.fromkeys(STACKS, True)
    for stack in ("lmcache", "vllm"):
        purge(cache, names(cache)[stack])
        assert not sum(each["chunks"] for each in forebay("ls", cache, "--namespaces") if MARKS[stack] in each["model"])
        left[stack] = False
        assert found(doors) == left

    # All of it after a restart of all.
    told({stack: doors[stack] for stack in ("vllm", "lmcache")}, "store")
    for door in doors.values():
        door.close()
    doors |= opened(cache)
    assert found(doors) == dict.fromkeys(STACKS, True)
