"""Whether a blended prompt's question is still answered from its documents: the second table of docs/blend.md, by blend_quality.py.

Each prompt is a beginning, which is the anchor, four documents and a question. Each document has a fact, a place and the name of its keeper, among
other sentences. The question is about one of the places, whose document is never the first: it stands elsewhere than where it was stored, right behind the
anchor. The answer is the likeliest of eight names, each of one token: the four of the documents, and four that stand nowhere. So one answer of eight
is right by chance, and one of four where a name of the documents is taken at random.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

SEED = 5
SYSTEM = "Answer the question from these documents.\n\n"
TITLE, FACT = "{place} station.", "The keeper of {place} is called {name}."
QUESTION = "Question: What is the keeper of {place} called?\nAnswer: The keeper of {place} is called"
DOCUMENTS, NAMED, SENTENCES = 4, 8, 4
NAMES = (
    "Anna Peter Maria Thomas Sarah David Laura Robert Emma Daniel Julia Martin Alice George Helen Oliver Clara Henry Rosa Simon Lucy Paul Eva Frank "
    "Mark John James Mary Susan Adam Grace Jack Karen Linda Kate Charles Edward William Joseph Elizabeth"
).split()
PLACES = "Alder Birch Cedar Rowan Maple Willow Linden Poplar Juniper Hazel Aspen Larch Elm Holly Laurel Oak Pine Ash Beech Chestnut".split()
#: What else a document says; `number` and `of` are drawn anew for each.
OTHERS = [
    "It was built in 18{number} and stands near {of}.",
    "The roof was repaired {number} years ago.",
    "There are {number} gates and a pump, and a path leads to {of}.",
    "In spring the water rises by {number} inches, and the lower rooms are empty then.",
    "Visitors may come when the lamp at {of} is lit.",
    "A garden of {number} beds lies behind the house, with beans and apples.",
    "The books are kept on a shelf that came from {of}.",
    "On Sundays a cart brings flour and oil from {of}.",
    "The bell is rung {number} times when the ice breaks.",
    "From the window one sees {of} and {number} boats.",
]
THINGS = ("the harbour", "the mill", "the old bridge", "the market", "the chapel", "the forest", "the lake", "the railway")
#: What is blended: selector and ratio.
ARMS = [("none", 0.0)] + [(select, ratio) for select in ("query", "deviation", "first-k") for ratio in (0.05, 0.15, 0.3)] + [("random", 0.15)]
WHOLE, WITHOUT = "full prefill", "the question without the documents"


@dataclass
class Prompt:
    """One prompt, in tokens."""

    documents: list[list[int]]
    question: list[int]
    names: list[int]
    """The candidates: those of the documents first, in their order."""
    right: int
    """Which of them is asked for."""

    def placed(self, anchor: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """All tokens, and the documents' places."""
        tokens, places = list(anchor), []
        for document in self.documents:
            places.append((len(tokens), len(tokens) + len(document)))
            tokens += document
        return tokens + self.question, places


@dataclass
class Answers:
    """Which candidate was taken, by prompt."""

    right: list[int] = field(default_factory=list)
    taken: dict[str, list[int]] = field(default_factory=dict)

    def correct(self, arm: str) -> int:
        """How many are right."""
        return sum(a == b for a, b in zip(self.taken[arm], self.right, strict=True))

    def agree(self, arm: str) -> int:
        """How many are those of a full prefill."""
        return sum(a == b for a, b in zip(self.taken[arm], self.taken[WHOLE], strict=True))


def prompts(encode: Callable[[str], list[int]], count: int) -> list[Prompt]:
    """`count` prompts, the same every time."""
    source, made = random.Random(SEED), []
    for _ in range(count):
        places, names = source.sample(PLACES, DOCUMENTS), source.sample(NAMES, NAMED)
        documents = [encode(_document(source, place, name)) for place, name in zip(places, names)]
        right = source.randrange(1, DOCUMENTS)
        candidates = [encode(f" {name}") for name in names]
        assert all(len(one) == 1 for one in candidates), names
        made.append(Prompt(documents, encode(QUESTION.format(place=places[right])), [one for (one,) in candidates], right))
    return made


def _document(source: random.Random, place: str, name: str) -> str:
    said = [of.format(number=source.randrange(12, 90), of=source.choice(THINGS)) for of in source.sample(OTHERS, SENTENCES)]
    said.insert(source.randrange(SENTENCES + 1), FACT.format(place=place, name=name))
    return " ".join([TITLE.format(place=place), *said]) + "\n\n"


def measured(llm: Any, count: int) -> Answers:
    """What is taken with a full prefill, without documents, and with each arm."""
    from forebay.vllm.blend import Blend
    from forebay.vllm.blend.blender import Asked

    tokenizer = llm.get_tokenizer()
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    anchor, found, source = encode(SYSTEM), Answers(), random.Random(SEED)
    blend = Blend(llm, anchor)
    (blender,) = llm.collective_rpc(lambda worker: worker.forebay_blender)

    def takes(arm: str, prompt: Prompt, rows: range) -> None:
        """What the model takes after these rows, of which the last is the prompt's last token."""
        logits = blender.logits(blender.forward(list(rows))[-1:])[0, prompt.names]
        found.taken.setdefault(arm, []).append(int(logits.argmax()))

    for number, prompt in enumerate(prompts(encode, count), 1):
        began = time.monotonic()
        tokens, places = prompt.placed(anchor)
        last = places[-1][1]
        found.right.append(prompt.right)
        for document in prompt.documents:
            blend.store(document)
        for arm, whole in ((WITHOUT, anchor + prompt.question), (WHOLE, tokens)):
            blender.mix(Asked(whole, [], "none", [0.0]))
            takes(arm, prompt, range(len(whole)))
        for select, ratio in ARMS:
            drawn = sorted(source.sample(range(places[0][0], last), round(ratio * (last - places[0][0]))))
            asked = Asked(tokens, places, drawn if select == "random" else select, [ratio], anchor=anchor)
            mixed = blender.mix(asked)
            assert mixed.states == ["reused"] * DOCUMENTS, mixed.states
            blender.blend(asked, mixed, last)
            takes(f"{select} {ratio:.0%}", prompt, range(last, len(tokens)))
        so_far = {arm: found.correct(arm) for arm in found.taken}
        print(f"prompt {number} of {count}, {time.monotonic() - began:.0f} s, right: {so_far}", file=sys.stderr, flush=True)
    return found


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The bounds of the 95 % interval of a share, after Wilson."""
    z, share = 1.959964, hits / of
    middle, width = share + z * z / (2 * of), z * sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return (middle - width) / (1 + z * z / of), (middle + width) / (1 + z * z / of)


def table(found: Answers) -> list[str]:
    """The rows of the page."""
    lines = ["| recomputed | share | right answers | 95 % interval | the answer of a full prefill |", "|---|---|---|---|---|"]
    names = {"random": "random tokens, for comparison"}
    rows = [(WHOLE, WHOLE, "100 %")]
    rows += [(f"{select} {ratio:.0%}", names.get(select, f"`{select}`"), f"{ratio:.0%}".replace("%", " %")) for select, ratio in ARMS]
    rows += [(WITHOUT, WITHOUT, "")]
    for arm, what, share in rows:
        of, hits, same = len(found.right), found.correct(arm), found.agree(arm)
        low, high = wilson(hits, of)
        lines.append(f"| {what} | {share} | {hits} of {of} | {100 * low:.0f} to {100 * high:.0f} % | {same} of {of} |")
    return lines
