"""Segments found by a separator in a prompt's tokens.

What stands before the first separator is the prompt's beginning, what stands between two is a
segment, what stands behind the last is the question. The separator's own tokens are in no segment.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.config import ModelConfig
    from vllm.tokenizers import TokenizerLike

#: LMCache's name of the setting.
KEY = "blend_special_str"


def of_server(model: ModelConfig, text: str) -> list[int]:
    """The separator's tokens, by the server's own tokenizer; `ValueError` where there is none."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model)
    if tokenizer is None:
        raise ValueError(
            f"{KEY} needs the server's tokenizer, and this server starts without one: start it without --skip-tokenizer-init, or leave {KEY} "
            "out and let requests say where their segments are (forebay.segments)"
        )
    return encoded(tokenizer, text)


def encoded(tokenizer: TokenizerLike, text: str) -> list[int]:
    """The separator's tokens, without those that begin every prompt."""
    if not (tokens := list(tokenizer.encode(text, add_special_tokens=False))):
        raise ValueError(f"{KEY} is {text!r}, which has no tokens in this tokenizer; choose another")
    return tokens


def segments(tokens: Sequence[int], separator: Sequence[int]) -> list[tuple[int, int]]:
    """The `(start, end)` of each segment; none where there are not two separators. Two side by side
    have no segment between them."""
    found = list(_occurrences(tokens, separator))
    places = [(before + len(separator), at) for before, at in zip(found, found[1:])]
    return [(start, end) for start, end in places if start < end]


def _occurrences(tokens: Sequence[int], separator: Sequence[int]) -> Iterator[int]:
    """Where the separator stands, from the left, without overlaps."""
    # The search is that of bytes: a loop over a long prompt's tokens would hold the scheduler up.
    packed, wanted = array("q", tokens), array("q", separator).tobytes()
    text, width, at = packed.tobytes(), packed.itemsize, 0
    while (at := text.find(wanted, at)) >= 0:
        if at % width == 0:
            yield at // width
            at += len(wanted)
        else:
            # Across the bytes of two tokens.
            at += 1
