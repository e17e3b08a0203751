"""At which pages a prompt can be resumed, where a pool needs the last pages before that point only: windows and recurrent state."""

from __future__ import annotations

from collections.abc import Sequence


def window_ends(there: Sequence[bool], window: int) -> list[int]:
    """The prefix lengths whose last `window` pages are there, or all of them where there are fewer."""
    ends, run = [], 0
    for end, is_there in enumerate(there, 1):
        run = run + 1 if is_there else 0
        if run >= min(window, end):
            ends.append(end)
    return ends
