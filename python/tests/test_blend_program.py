"""`python -m forebay.vllm.blend` without vLLM: what it reads, and what it says to arguments and
lines that make no sense."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.vllm.blend import lines
from forebay.vllm.blend.__main__ import _settings


def ran(folder: Path, command: str, written: str, *more: str) -> subprocess.CompletedProcess[str]:
    """The program with a file of these lines."""
    (folder / "cache").mkdir()
    (folder / "lines.jsonl").write_text(written)
    named = [command, str(folder / "lines.jsonl"), "--model", "a-model", "--cache-dir", str(folder / "cache"), *more]
    return subprocess.run([sys.executable, "-m", "forebay.vllm.blend", *named], capture_output=True, text=True, check=False)


PLACED: dict[str, Any] = {"tokens": [*range(100)], "segments": [[10, 20], [30, 40]]}


@pytest.mark.parametrize(
    ("command", "line", "says"),
    [
        ("store", "", "no line has anything"),
        ("store", "\n{]", "line 2 is no JSON"),
        ("store", "[1, 2]", "line 1 is no JSON object"),
        ("store", {"anchor": "a"}, "line 1 has no segment"),
        ("store", {"segment": ""}, "segment is empty"),
        ("store", {"segment": [1, -2]}, "give a text, or a list of token ids"),
        ("store", {"segment": [1, True]}, "give a text, or a list of token ids"),
        ("store", {"segment": "a", "text": "b"}, "line 1 has 'text'; a line has segment, anchor"),
        ("blend", {"question": "a"}, "line 1 has no segments"),
        ("blend", {"segments": ["a", ""], "question": "a"}, "segments is empty"),
        ("blend", {"segments": ["a"]}, "no token follows the last segment"),
        ("blend", {"segments": ["a"], "question": "a", "select": "best"}, "use one of query"),
        ("blend", {"segments": ["a"], "question": "a", "select": [0]}, "select names positions"),
        ("blend", PLACED | {"select": [25]}, "position 25"),
        ("blend", {"segments": ["a"], "question": "a", "ratio": 1.5}, "ratio is 1.5"),
        ("blend", {"segments": ["a"], "question": "a", "ratio": "much"}, "line 1: could not convert"),
        ("blend", {"segments": ["a"], "question": "a", "select": "deviation", "threshold": -1}, "threshold is -1.0"),
        ("blend", {"segments": ["a"], "question": "a", "threshold": 0.1}, "threshold is for what select deviation compares"),
        ("blend", PLACED | {"tokens": "a text"}, "tokens is a list of token ids"),
        ("blend", PLACED | {"question": "a"}, "tokens is a list of token ids"),
        ("blend", PLACED | {"segments": ["a"]}, "segments beside tokens are places"),
        ("blend", PLACED | {"segments": [[30, 40], [10, 20]]}, "segments must ascend"),
        ("blend", PLACED | {"segments": [[30, 101]]}, "end in the prompt"),
        ("blend", PLACED | {"anchor": 11}, "anchor beside tokens is how many of the first tokens it has, 10 at most"),
    ],
)
def test_a_line_that_makes_no_sense_is_named_before_vllm_starts(tmp_path: Path, command: str, line: Any, says: str) -> None:
    done = ran(tmp_path, command, line if isinstance(line, str) else json.dumps(line))
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--set", "chunk_size"], "--set chunk_size: write KEY=VALUE"),
        (["--set", "chunksize=512"], "chunk_size"),
        (["--cache-dir", "/nowhere"], "/nowhere is no directory"),
        (["--cache-dir", "/tmp, /nowhere"], "/nowhere is no directory"),
        (["--cache-dir", "/tmp,"], "has a name missing"),
        (["--anchor", "a", "--anchor-file", "b"], "not allowed with argument"),
        (["--anchor-file", "/nowhere"], "/nowhere"),
        (["--ratio", "1"], "unrecognized arguments: --ratio 1"),
    ],
)
def test_arguments_that_make_no_sense_are_named(tmp_path: Path, more: list[str], says: str) -> None:
    done = ran(tmp_path, "store", json.dumps({"segment": "a"}), *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_without_vllm_it_says_which_python_to_use(tmp_path: Path) -> None:
    done = ran(tmp_path, "store", json.dumps({"segment": "a"}))
    assert (done.returncode, done.stdout) == (1, "")
    assert "vLLM cannot be imported" in done.stderr
    assert sys.executable in done.stderr


def test_each_drive_has_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    asked = argparse.Namespace(cache_dir="a, b", set=["capacity=1GiB"])
    assert _settings(asked) == {"cache_dir": f"{tmp_path}/a,{tmp_path}/b", "capacity": "1GiB"}


def letters(part: lines.Given) -> list[int]:
    """A letter is a token."""
    return [*map(ord, part)] if isinstance(part, str) else part


def test_texts_and_token_ids_of_one_prompt_are_read_alike(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    texts = {"anchor": "ab", "segments": ["cde", [102, 103]], "question": "h", "ratio": 0.3}
    ids = {"tokens": [*range(97, 105)], "segments": [[2, 5], [5, 7]], "select": "first-k", "cache_salt": "me"}
    short = ids | {"anchor": 1}
    file.write_text("\n\n".join(map(json.dumps, (texts, ids, short))))
    first, second, third = lines.prompts(file, "not this one")
    assert [one.number for one in (first, second, third)] == [1, 3, 5]
    assert [one.has_text() for one in (first, second)] == [True, False]
    tokens, places, anchor = first.encoded(letters)
    assert (tokens, places, anchor) == ([*range(97, 105)], [(2, 5), (5, 7)], [97, 98])
    assert second.encoded(letters) == (tokens, places, anchor)
    assert third.encoded(letters) == (tokens, places, [97])
    assert (first.how, second.how) == ({"ratio": 0.3}, {"select": "first-k", "cache_salt": "me"})


def test_what_stands_between_segments_is_no_segment(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps({"tokens": [*range(12)], "segments": [[0, 3], [5, 7], [7, 9]]}))
    (read,) = lines.prompts(file, "")
    assert read.encoded(letters) == ([*range(12)], [(0, 3), (5, 7), (7, 9)], [])


def test_lines_without_an_anchor_have_that_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps({"segment": [5]}) + "\n" + json.dumps({"segment": "b", "anchor": ""}))
    first, second = lines.segments(file, "begin")
    assert (first.anchor, first.has_text(), second.anchor, second.segment) == ("begin", True, "", "b")
    file.write_text(json.dumps({"segments": ["b"], "question": "c"}))
    (prompt,) = lines.prompts(file, "begin")
    assert prompt.encoded(letters)[1:] == ([(5, 6)], letters("begin"))
