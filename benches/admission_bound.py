"""What admission could save on a request trace, if it knew the future of every kind of chunk: a bound for `--admission adaptive`.

    python3 benches/admission_bound.py TRACE [--capacity-tokens 20000000] [--memory-tokens 3000000] [--loss 0.02]

For each chunk that is new to the drive: does it come back when the memory above no longer has it, before so many new chunks have passed as
the drive has room for? Only those are lost by refusing, once each. Kinds are refused in the order of the share that is lost, in hindsight,
until the losses are the given share of all hits. The first row has the kinds that `adaptive` tells apart, the others one more trait each,
cut into six. The room that is gained by refusing is not counted, nor is anything lost by having to learn.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BLOCK = 512
PARTS = 6


@dataclass
class Chunk:
    """A chunk that was new to the drive."""

    traits: dict[str, float]
    part: float
    """Of a full chunk."""
    ends: int
    touched: int
    lost: bool | None = None
    """Whether its first return would have come from the drive; None before."""


def chunks_of(trace: Path, room: int, memory_room: int) -> tuple[list[Chunk], int]:
    """All chunks of the trace, and how many blocks were found in memory or on the drive."""
    known: dict[int, Chunk] = {}
    memory: OrderedDict[int, None] = OrderedDict()
    clock = hits = 0
    for line in trace.read_text().splitlines():
        request = json.loads(line)
        blocks, length = request["hash_ids"], request["input_length"]
        found = next((i for i, b in enumerate(blocks) if b not in known), len(blocks))
        resident = next((i for i, b in enumerate(blocks) if b not in memory), len(blocks))
        for at, block in enumerate(blocks[:found]):
            chunk = known[block]
            age = clock - chunk.touched
            hits += at < resident or age < room
            if chunk.lost is None:
                chunk.lost = at >= resident and age < room
            chunk.touched = clock
        parent = known[blocks[found - 1]] if found else None
        fresh = [b for b in dict.fromkeys(blocks[found:]) if b not in known]
        for place, block in enumerate(fresh):
            clock += 1
            end = found + place == len(blocks) - 1
            traits = {
                "new chunks behind it": len(fresh) - place,
                "chunks before it": found + place,
                "chunks of the prompt": len(blocks),
                "tokens generated": request["output_length"],
                "new chunks since its prefix was used": clock - parent.touched if parent else 0,
                "length": len(fresh),
            }
            part = length % BLOCK / BLOCK if end and length % BLOCK else 1.0
            known[block] = Chunk(traits, part, parent.ends + 1 if parent else 0, clock)
        for block in blocks:
            memory.pop(block, None)
            memory[block] = None
        while len(memory) > memory_room:
            memory.popitem(last=False)
    return list(known.values()), hits


def kind(chunk: Chunk) -> tuple[int, ...]:
    """As `src/index/policy/admission.rs` tells them apart where it does not know what was generated."""
    if chunk.part < 1.0:
        return (0,)
    return (min(max(chunk.ends, 1), 3), int(chunk.traits["length"]).bit_length())


def refused(chunks: list[Chunk], of: Callable[[Chunk], tuple[int, ...]], most: float) -> float:
    """Share of the bytes that need not be written where `most` chunks may be lost."""
    sums: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for chunk in chunks:
        both = sums[of(chunk)]
        both[0] += chunk.part
        both[1] += bool(chunk.lost)
    whole = sum(part for part, _ in sums.values())
    saved = 0.0
    for part, lost in sorted(sums.values(), key=lambda both: both[1] / both[0] if both[0] else 0.0):
        share = min(1.0, most / lost) if lost else 1.0
        saved, most = saved + share * part, most - share * lost
        if share < 1.0:
            break
    return saved / whole


def main() -> None:
    """Prints the table."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    asked.add_argument("trace", type=Path)
    asked.add_argument("--capacity-tokens", type=int, default=20_000_000)
    asked.add_argument("--memory-tokens", type=int, default=3_000_000)
    asked.add_argument("--loss", type=float, default=0.02, help="share of the hits that may be lost")
    options = asked.parse_args()
    chunks, hits = chunks_of(options.trace, options.capacity_tokens // BLOCK, options.memory_tokens // BLOCK)
    most = options.loss * hits
    print(f"{len(chunks)} chunks, {hits} hits, of which {most:.0f} may be lost")
    print(f"{'kinds of adaptive':45} {100 * refused(chunks, kind, most):5.1f} % of the bytes refused")
    for trait in chunks[0].traits:
        values = sorted(chunk.traits[trait] for chunk in chunks)
        cuts = [values[len(values) * part // PARTS] for part in range(1, PARTS)]

        def finer(chunk: Chunk, trait: str = trait, cuts: list[float] = cuts) -> tuple[int, ...]:
            plain = kind(chunk)
            return plain if chunk.part < 1.0 else (*plain, bisect_right(cuts, chunk.traits[trait]))

        print(f"{'and ' + trait:45} {100 * refused(chunks, finer, most):5.1f} %")


if __name__ == "__main__":
    main()
