"""Which tokens of reused segments are computed anew. Arithmetic only: it knows tensors, and nothing of vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def budget(rows: int, ratio: float) -> int:
    """How many of `rows` tokens a ratio means."""
    return min(rows, round(rows * ratio))


def first(segments: list[tuple[int, int]], ratio: float) -> list[int]:
    """The first tokens of each segment, as many of each as its length calls for."""
    return [row for start, end in segments for row in range(start, start + budget(end - start, ratio))]


def largest(scores: torch.Tensor, rows: list[int], ratio: float) -> list[int]:
    """Those of `rows` with the largest `scores[row]`, in ascending order; of equal ones the earlier."""
    order = scores[rows].argsort(descending=True, stable=True).tolist()
    return sorted(rows[at] for at in order[: budget(len(rows), ratio)])


def attention(queries: torch.Tensor, keys: torch.Tensor, first_query: int, scale: float) -> torch.Tensor:
    """How much one layer's queries attend to each key, summed over queries and heads: `[row]`.

    `queries` are `[query, query head, element]` of the positions from `first_query` on, `keys` `[row, KV head, element]` from position 0 on.
    """
    import torch

    heads, asking = keys.shape[1], queries.shape[0]
    grouped = (queries.float() * scale).unflatten(1, (heads, queries.shape[1] // heads))
    # Among the queries' own rows alone there are later ones.
    places = torch.arange(first_query, keys.shape[0], device=keys.device)
    later = places[None] > places[:asking, None]
    mass = torch.zeros(keys.shape[0], device=keys.device)
    for head in range(heads):
        logits = torch.matmul(grouped[:, head].transpose(0, 1), keys[:, head].float().T)
        logits[..., first_query:].masked_fill_(later, float("-inf"))
        mass += logits.softmax(-1).sum((0, 1))
    return mass


def deviation(fresh: tuple[torch.Tensor, torch.Tensor], stored: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """How far keys and values are from the stored ones: `[row]`."""
    pairs = zip(fresh, stored, strict=True)
    return sum(((new.float() - old.float()) ** 2).sum((-1, -2)) for new, old in pairs)  # type: ignore[return-value]
