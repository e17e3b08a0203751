"""Whether reading the next turn of a conversation ahead, before it is asked for, would pay on a trace of requests.

For every prompt of the trace it is known when its last full block is asked for again, if ever: the next turn. A predictor that
knows only how long ago a prompt was asked for reads it ahead at age A and keeps it until age A + W. This prints, for several A
and W, which share of the tokens read ahead is used, and which share of the hits that only the drive has it makes memory hits. It
is kinder than any implementation: such reads take no time, and no room from what the memory tier keeps.

Usage: python3 next_turn.py TRACE [--memory-tokens 3000000]
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from pathlib import Path

BLOCK_TOKENS = 512
AGES_S = (60, 120, 300, 600, 1200)
WINDOWS_S = (60, 300, 900, 3600)


class Turn:
    """A prompt, and how its next turn finds it."""

    def __init__(self, at: float, blocks: list[int]) -> None:
        """A prompt of these full blocks, at this second."""
        self.at, self.blocks = at, blocks
        self.gap: float | None = None
        self.on_drive_only = 0


def turns(trace: Path, memory_blocks: int) -> list[Turn]:
    """The prompts, in order; the drive keeps everything, the memory what was used last."""
    memory: OrderedDict[int, None] = OrderedDict()
    last: dict[int, Turn] = {}
    all_turns = []
    for line in trace.read_text().splitlines():
        request = json.loads(line)
        blocks = request["hash_ids"][: request["input_length"] // BLOCK_TOKENS]
        turn = Turn(request["timestamp"] / 1000, blocks)
        found = next((n for n, block in enumerate(blocks) if block not in last), len(blocks))
        if found:
            # The prompt whose end lies furthest in what is found is the turn before.
            before = last[blocks[found - 1]]
            if before.gap is None:
                before.gap = turn.at - before.at
                before.on_drive_only = sum(block not in memory for block in blocks[:found])
        for block in reversed(blocks):
            memory[block] = None
            memory.move_to_end(block)
            last[block] = turn
        while len(memory) > memory_blocks:
            memory.popitem(last=False)
        all_turns.append(turn)
    return all_turns


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--memory-tokens", type=int, default=3_000_000)
    args = parser.parse_args()
    all_turns = turns(args.trace, args.memory_tokens // BLOCK_TOKENS)
    end = all_turns[-1].at
    of_drive = sum(turn.on_drive_only for turn in all_turns)
    print(f"{len(all_turns)} prompts; {of_drive * BLOCK_TOKENS} tokens of next turns lie on the drive only")
    print("age s  window s  read ahead, tokens  of them used  drive-only hits that become memory hits")
    for age in AGES_S:
        for window in WINDOWS_S:
            # Only what can still be used before the trace ends is counted.
            ahead = [t for t in all_turns if (t.gap is None or t.gap > age) and t.at + age + window <= end]
            read = sum(len(t.blocks) for t in ahead)
            used = sum(t.on_drive_only for t in ahead if t.gap is not None and t.gap <= age + window)
            if read:
                share = used / read
                print(f"{age:5}  {window:8}  {read * BLOCK_TOKENS:18}  {share:12.3f}  {used / of_drive:.3f}")


if __name__ == "__main__":
    main()
