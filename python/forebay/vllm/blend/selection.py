"""Which tokens of reused segments are computed anew. Arithmetic only: it knows tensors, and nothing of vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Logits that are computed at once: a quarter of a gigabyte, with their softmax.
MOST_LOGITS = 1 << 25


def budget(rows: int, ratio: float) -> int:
    """How many of `rows` tokens a ratio means."""
    return min(rows, round(rows * ratio))


def first(segments: list[tuple[int, int]], ratio: float) -> list[int]:
    """The first tokens of each segment, as many of each as its length calls for."""
    return [row for start, end in segments for row in range(start, start + budget(end - start, ratio))]


def largest(scores: torch.Tensor, rows: list[int], count: int) -> list[int]:
    """The `count` of `rows` with the largest `scores[row]`, in ascending order; of equal ones the earlier."""
    order = scores[rows].argsort(descending=True, stable=True).tolist()
    return sorted(rows[at] for at in order[:count])


def attention(queries: torch.Tensor, keys: torch.Tensor, first_query: int, scale: float, at_once: int = 0) -> torch.Tensor:
    """How much one layer's queries attend to each key, summed over queries and heads: `[row]`.

    `queries` are `[query, query head, element]` of the positions from `first_query` on, `keys` `[row, KV head, element]` from position 0 on.
    So many KV heads are computed at once; 0 means as many as suit the device. Of many queries a part is computed at a time, since vLLM
    leaves no memory for the logits of all of them.
    """
    import torch

    (rows, heads, _), asking = keys.shape, queries.shape[0]
    group = queries.shape[1] // heads
    part = max(1, min(asking, MOST_LOGITS // (group * rows)))
    if at_once == 0:
        # One at a time stays in a processor's caches; a GPU would wait for the host between so many
        # small kernels.
        at_once = max(1, MOST_LOGITS // (group * part * rows)) if keys.is_cuda else 1
    grouped = (queries.float() * scale).unflatten(1, (heads, group)).permute(1, 2, 0, 3)
    # Among the queries' own rows alone there are later ones.
    places = torch.arange(first_query, rows, device=keys.device)
    mass = torch.zeros(rows, device=keys.device)
    for some, own in zip(grouped.split(part, 2), places[:asking].split(part), strict=True):
        later = places[None] > own[:, None]
        for of_heads, of in zip(some.split(at_once), keys.permute(1, 2, 0).split(at_once), strict=True):
            logits = torch.matmul(of_heads.flatten(1, 2), of.float()).unflatten(1, (group, len(own)))
            logits[..., first_query:].masked_fill_(later, float("-inf"))
            mass += logits.softmax(-1).sum((0, 1, 2))
    return mass


def deviation(fresh: tuple[torch.Tensor, torch.Tensor], stored: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """How far keys and values are from the stored ones, and how large they are; both squared: `[2, row]`."""
    import torch

    squares = [((new.float() - old.float()) ** 2, new.float() ** 2) for new, old in zip(fresh, stored, strict=True)]
    return torch.stack([sum(kind).sum((-1, -2)) for kind in zip(*squares)])


def beyond(deviations: torch.Tensor, rows: list[int], threshold: float) -> list[int]:
    """Those of `rows` that are at least `threshold` of their own size away."""
    far, size = deviations[:, rows]
    return [row for row, is_far in zip(rows, (far >= threshold**2 * size).tolist()) if is_far]
