"""The JSON lines that `python -m forebay.vllm.blend` reads: segments to store, prompts to blend.

Wherever tokens stand in a line, a text may stand instead; it is encoded by the server's tokenizer,
apart from what stands beside it and without special tokens of its own. Nothing here needs vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from forebay.vllm.blend import client

#: A text, or token ids.
Given = Union[str, list[int]]
Encode = Callable[[Given], list[int]]

#: What a line may have.
OF_SEGMENT = ("segment", "anchor")
OF_PROMPT = ("tokens", "segments", "anchor", "question", "select", "ratio", "check_layer", "threshold", "cache_salt")


class Wrong(ValueError):
    """A line that makes no sense; the message names it."""


@dataclass(frozen=True)
class Segment:
    """A segment to store."""

    number: int
    """Of its line."""
    segment: Given
    anchor: Given

    def has_text(self) -> bool:
        """Whether a tokenizer is needed."""
        return isinstance(self.segment, str) or isinstance(self.anchor, str)


@dataclass(frozen=True)
class Prompt:
    """A prompt to blend: parts one behind the other, some of them segments."""

    number: int
    parts: list[Given]
    is_segment: list[bool]
    behind: int | None
    """How many of the first tokens the segments are stored behind; None: all before the first."""
    how: dict[str, Any]
    """Arguments of `Blend.blend`."""

    def has_text(self) -> bool:
        """Whether a tokenizer is needed."""
        return any(isinstance(part, str) for part in self.parts)

    def encoded(self, encode: Encode) -> tuple[list[int], list[tuple[int, int]], list[int]]:
        """Tokens, the places of the segments in them, and the anchor."""
        tokens: list[int] = []
        places = []
        for part, is_segment in zip(self.parts, self.is_segment, strict=True):
            start = len(tokens)
            tokens += encode(part)
            if is_segment:
                places.append((start, len(tokens)))
        behind = places[0][0] if self.behind is None else self.behind
        return tokens, places, tokens[:behind]


def segments(path: Path, anchor: Given) -> list[Segment]:
    """Those of a file; `anchor` is that of lines which name none."""
    return [_segment(number, line, anchor) for number, line in _lines(path, OF_SEGMENT)]


def prompts(path: Path, anchor: Given) -> list[Prompt]:
    """Those of a file; `anchor` stands before the parts of lines which name none."""
    return [_prompt(number, line, anchor) for number, line in _lines(path, OF_PROMPT)]


def _lines(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        # Not `splitlines`: a text may have other line separators in it.
        written = path.read_bytes().decode().split("\n")
    except UnicodeDecodeError as error:
        raise Wrong(f"it is no UTF-8: {error}") from error
    found = False
    for number, text in enumerate(written, 1):
        if not text.strip():
            continue
        found = True
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise Wrong(f"line {number} is no JSON: {error}") from error
        if not isinstance(line, dict):
            raise Wrong(f"line {number} is no JSON object")
        if unknown := sorted(line.keys() - set(fields)):
            raise Wrong(f"line {number} has {unknown[0]!r}; a line has {', '.join(fields)}")
        yield number, line
    if not found:
        raise Wrong("no line has anything")


def _segment(number: int, line: dict[str, Any], anchor: Given) -> Segment:
    if "segment" not in line:
        raise Wrong(f"line {number} has no segment: a text, or a list of token ids")
    behind = _given(number, "anchor", line.get("anchor", anchor), may_be_empty=True)
    return Segment(number, _given(number, "segment", line["segment"]), behind)


def _prompt(number: int, line: dict[str, Any], anchor: Given) -> Prompt:
    listed = line.get("segments")
    if not isinstance(listed, list) or not listed:
        raise Wrong(f"line {number} has no segments: a list of texts, of lists of token ids, or beside tokens of places [start, end]")
    how = {key: line[key] for key in ("select", "ratio", "check_layer", "threshold", "cache_salt") if key in line}
    if "tokens" not in line and not isinstance(how.get("select", ""), str):
        raise Wrong(f"line {number}: select names positions, which are known beside tokens alone")
    made = _placed(number, line, listed, how) if "tokens" in line else _in_parts(number, line, listed, anchor, how)
    try:
        # As if each letter were a token: what is wrong with the places, the selector or the ratio.
        tokens, places, _ = made.encoded(lambda part: [0] * len(part))
        ratios, thresholds = client.shares(how.get("ratio", 0.15)), client.shares(how.get("threshold", ()))
        client.check(tokens, places, how.get("select", "query"), ratios, client.numbers(how.get("check_layer", 1)), thresholds)
    except (client.BlendError, TypeError, ValueError) as error:
        raise Wrong(f"line {number}: {error}") from error
    return made


def _placed(number: int, line: dict[str, Any], listed: list[Any], how: dict[str, Any]) -> Prompt:
    tokens = _given(number, "tokens", line["tokens"])
    if isinstance(tokens, str) or "question" in line:
        why = "tokens is a list of token ids, the whole prompt; for texts leave it out and give anchor, segments and question"
        raise Wrong(f"line {number}: {why}")
    if not all(_is_ids(place) and len(place) == 2 for place in listed):
        raise Wrong(f"line {number}: segments beside tokens are places, [start, end] each")
    places = [(start, end) for start, end in listed]
    try:
        client.check(tokens, places, "none", [0.0])
    except client.BlendError as error:
        raise Wrong(f"line {number}: {error}") from error
    behind = line.get("anchor", places[0][0])
    if not isinstance(behind, int) or not 0 <= behind <= places[0][0]:
        raise Wrong(f"line {number}: anchor beside tokens is how many of the first tokens it has, {places[0][0]} at most")
    parts: list[Given] = []
    is_segment, before = [], 0
    for start, end in [*places, (len(tokens), len(tokens))]:
        parts += [tokens[before:start], tokens[start:end]]
        is_segment += [False, end > start]
        before = end
    return Prompt(number, parts, is_segment, behind, how)


def _in_parts(number: int, line: dict[str, Any], listed: list[Any], anchor: Given, how: dict[str, Any]) -> Prompt:
    begin = _given(number, "anchor", line.get("anchor", anchor), may_be_empty=True)
    between = [_given(number, "segments", part) for part in listed]
    end = _given(number, "question", line.get("question", ""), may_be_empty=True)
    return Prompt(number, [begin, *between, end], [False, *(True for _ in between), False], None, how)


def _given(number: int, name: str, value: Any, may_be_empty: bool = False) -> Given:
    if not (isinstance(value, str) or _is_ids(value)):
        raise Wrong(f"line {number}: {name} has {value!r}; give a text, or a list of token ids")
    if not value and not may_be_empty:
        raise Wrong(f"line {number}: {name} is empty")
    return value  # type: ignore[no-any-return]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value)
