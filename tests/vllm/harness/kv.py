"""The KV and the tokens that are right: functions of a request's token ids, of the layer and of the rank.

Each token's KV depends on all tokens before it, as a model's does, so that KV of another prefix is never taken for the right one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

#: Token ids that prompts and outputs are made of.
FIRST_TOKEN, VOCABULARY = 4, 512
#: Bytes that are in a block before it is computed or loaded; no word of right KV is equal to it, but by a chance of 2^-64.
POISON = -0x5A5A5A5A5A5A5A5B
_WORD = (1 << 64) - 1
_STEP, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def _mixed(value: int) -> int:
    value = (value ^ (value >> 30)) * _MIX & _WORD
    return value ^ (value >> 27)


class Prefix:
    """The states of a growing or shrinking list of tokens: one number per position that stands for all tokens up to it."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        """From these tokens."""
        self.tokens: list[int] = []
        self._states: list[int] = []
        self._words: dict[tuple[int, int], np.ndarray] = {}
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens."""
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens."""
        state = self._states[-1] if self._states else 1
        for token in tokens:
            state = _mixed((state + _STEP + token) & _WORD)
            self.tokens.append(token)
            self._states.append(state)

    def truncate(self, length: int) -> None:
        """Takes tokens away."""
        del self.tokens[length:]
        del self._states[length:]
        self._words = {place: words[:length] for place, words in self._words.items()}

    def set(self, tokens: Sequence[int]) -> None:
        """Becomes these tokens."""
        same = next((i for i, (a, b) in enumerate(zip(self.tokens, tokens)) if a != b), min(len(self), len(tokens)))
        self.truncate(same)
        self.extend(tokens[same:])

    def next_token(self) -> int:
        """The token that the model generates after these."""
        return FIRST_TOKEN + (self._states[-1] >> 20) % (VOCABULARY - FIRST_TOKEN)

    def words(self, start: int, stop: int, place: tuple[int, int], count: int) -> np.ndarray:
        """Right KV of the positions `start..stop` at `place` (layer, rank): `count` words of 8 bytes for each."""
        known = self._words.get(place)
        if known is None or len(known) < stop:
            new = _words(self._states[len(known) if known is not None else 0 :], place, count)
            known = self._words[place] = new if known is None else np.concatenate((known, new))
        return known[start:stop]


def _words(states: list[int], place: tuple[int, int], count: int) -> np.ndarray:
    layer, rank = place
    salt = np.array([_mixed((layer << 40 | rank << 20 | word) + _STEP) for word in range(count)], dtype=np.uint64)
    mixed = (np.array(states, dtype=np.uint64)[:, None] ^ salt) * np.uint64(_MIX)
    return (mixed ^ (mixed >> np.uint64(29))).view(np.int64)


def generated(prompt: Sequence[int], max_tokens: int, stop: Iterable[int] = ()) -> list[int]:
    """What is right to generate after `prompt`, to the first token in `stop`."""
    prefix, ends, output = Prefix(prompt), set(stop), []
    while len(output) < max_tokens:
        output.append(prefix.next_token())
        if output[-1] in ends:
            break
        prefix.extend(output[-1:])
    return output
