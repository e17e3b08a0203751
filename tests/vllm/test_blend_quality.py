"""The arithmetic behind the tables of docs/blend.md, and the prompts of the one about recall; no model runs."""

from __future__ import annotations

import blend_quality
import blend_recall
import pytest
from blend_recall import WHOLE, WITHOUT, Answers


@pytest.mark.ci
@pytest.mark.parametrize(("hits", "of", "low", "high"), [(30, 60, 0.3773, 0.6227), (0, 40, 0.0, 0.0876), (40, 40, 0.9124, 1.0), (9, 10, 0.5958, 0.9821)])
def test_intervals_are_wilsons(hits: int, of: int, low: float, high: float) -> None:
    assert blend_recall.wilson(hits, of) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.ci
def test_an_interval_over_texts_holds_their_mean() -> None:
    mean, low, high = blend_quality.interval([1.0, 2.0, 3.0, 6.0])
    assert mean == 3.0
    assert 1.0 < low < mean < high < 6.0
    assert blend_quality.interval([2.0] * 5) == (2.0, 2.0, 2.0)


@pytest.mark.ci
def test_answers_are_counted_against_what_is_right_and_against_a_full_prefill() -> None:
    found = Answers([1, 2, 3, 1], {WHOLE: [1, 2, 0, 5], WITHOUT: [0, 0, 0, 0]})
    found.taken |= {f"{select} {ratio:.0%}": [1, 0, 3, 5] for select, ratio in blend_recall.ARMS}
    rows = blend_recall.table(found)
    assert rows[2] == "| full prefill | 100 % | 2 of 4 | 15 to 85 % | 4 of 4 |"
    assert rows[3] == "| `none` | 0 % | 2 of 4 | 15 to 85 % | 2 of 4 |"
    assert rows[-1] == "| the question without the documents |  | 0 of 4 | 0 to 49 % | 1 of 4 |"
    assert len(rows) == 2 + 2 + len(blend_recall.ARMS)


@pytest.mark.ci
def test_prompts_ask_for_a_fact_that_stands_elsewhere_than_where_it_was_stored() -> None:
    words: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        return [words.setdefault(word.strip(".:?"), len(words)) for word in text.split()]

    made = blend_recall.prompts(encode, 40)
    assert made == blend_recall.prompts(encode, 40)
    assert {prompt.right for prompt in made} == {1, 2, 3}
    for prompt in made:
        assert len({*prompt.names}) == blend_recall.NAMED
        where = [[name in document for document in prompt.documents] for name in prompt.names]
        assert where == [[place == name for place in range(4)] for name in range(8)], "one document has a name, or none"
        tokens, places = prompt.placed([-1, -2])
        assert [tokens[start:end] for start, end in places] == prompt.documents
        assert (tokens[:2], tokens[places[-1][1] :]) == ([-1, -2], prompt.question)
        assert places[prompt.right][0] > 2
