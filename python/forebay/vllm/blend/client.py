"""What a script calls: stores segments, blends prompts, and says which prompt to generate from.

A blended prompt is kept under a `cache_salt` of its own. vLLM's prefix cache and Forebay's keys include the salt, so nobody meets blended KV
who does not ask for it by that salt.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: What every salt of a blended prompt begins with.
SALT = "forebay-blend:"
#: What the names of the workers' methods begin with.
METHODS = "forebay_blend_"
SELECTORS = ("query", "deviation", "first-k", "none")


class BlendError(RuntimeError):
    """Nothing was blended or stored; the message says why and what to do."""


@dataclass(frozen=True)
class SegmentState:
    """What became of one segment of a prompt."""

    start: int
    end: int
    state: str
    """`reused`, or why its tokens were computed instead: `missing` (not stored), `failed` (its load), `gate` (its keys or values are not
    those of this model at this place)."""


@dataclass(frozen=True)
class Blended:
    """A prompt whose beginning is stored with blended KV."""

    tokens: list[int]
    salt: str
    covered: int
    """Tokens from the start whose KV is stored; vLLM computes the rest."""
    segments: list[SegmentState]
    reused: int
    """Tokens whose stored KV is used as it is, turned to their new positions."""
    recomputed: int
    """Tokens of reused segments that were computed anew."""
    was_there: bool
    """The same blend was stored already: nothing was computed, `segments` is empty, `reused` and `recomputed` are 0."""

    @property
    def prompt(self) -> dict[str, Any]:
        """What `LLM.generate` takes."""
        return {"prompt_token_ids": self.tokens, "cache_salt": self.salt}


class Blend:
    """Blending in the workers of one `LLM`, which must have been started with `ForebayConnector` and
    `worker_extension_cls="forebay.vllm.blend.worker.BlendWorker"`.

    `anchor` are tokens that every segment is stored behind, such as the beginning of the system prompt. It makes segments better at no cost
    when they are used. Segments that were stored behind another anchor are not found. Several of this class, with an anchor each, may share
    an `LLM`.
    """

    def __init__(self, llm: Any, anchor: Sequence[int] = ()) -> None:
        """Opens the namespace of segments in the connector's cache; raises `BlendError` where this server cannot blend."""
        self._llm = llm
        self._anchor = [int(token) for token in anchor]
        self._call("forebay_blend_open")

    def store(self, segment: Sequence[int]) -> int:
        """Computes a segment behind the anchor and stores it; returns once it is stored. How many tokens were computed: 0 where the segment
        is there already."""
        return int(self._call("forebay_blend_store", self._anchor, [int(token) for token in segment]))

    def has(self, segment: Sequence[int]) -> bool:
        """Whether a segment is stored."""
        return bool(self._call("forebay_blend_has", self._anchor, [int(token) for token in segment]))

    def blend(
        self,
        tokens: Sequence[int],
        segments: Sequence[tuple[int, int]],
        *,
        select: str | Sequence[int] = "query",
        ratio: float | Sequence[float] = 0.15,
        check_layer: int | Sequence[int] = 1,
        threshold: float | Sequence[float] = (),
        cache_salt: str | None = None,
    ) -> Blended:
        """Blends a prompt and stores its beginning, up to the block of the last segment's end, for
        the request that follows.

        `segments` are the `(start, end)` of segments in `tokens`, in ascending order. `select` says
        which of their tokens are computed anew: one of `SELECTORS` chooses a share of `ratio`, and
        a list gives positions in `tokens`. `check_layer` is the layer that `deviation` compares;
        with several, each has its own share. Tokens that deviate there by less than `threshold` of
        their own size are not computed anew. `cache_salt` is the tenant's own: only its requests
        meet this blend. Raises `BlendError` where nothing was stored.
        """
        tokens = [int(token) for token in tokens]
        given = [(int(start), int(end)) for start, end in segments]
        chosen: str | list[int] = select if isinstance(select, str) else sorted({int(row) for row in select})
        ratios, layers, thresholds = shares(ratio), numbers(check_layer), shares(threshold)
        check(tokens, given, chosen, ratios, layers, thresholds)
        how = (chosen, ratios, layers, thresholds, question(tokens, given, chosen))
        blended_as = salt(self._anchor, given, how, cache_salt)
        said = self._call("forebay_blend_prompt", self._anchor, tokens, given, chosen, ratios, layers, thresholds, blended_as)
        states = [SegmentState(start, end, state) for (start, end), state in zip(given, said["states"])]
        return Blended(tokens, blended_as, said["covered"], states, said["reused"], said["recomputed"], said["was_there"])

    def _call(self, method: str, *args: Any) -> Any:
        try:
            said = self._llm.collective_rpc(method, args=args)
        except AttributeError as error:
            raise BlendError(_NO_WORKER) from error
        except Exception as error:
            # An engine in a process of its own sends only the text of the error.
            raise BlendError(_NO_WORKER if method in str(error) else f"{method}: {error}") from error
        # Workers agree on results, but an error may be one worker's alone.
        if errors := [one["error"] for one in said if "error" in one]:
            raise BlendError(errors[0])
        return said[0]["result"]


def question(tokens: list[int], segments: Sequence[tuple[int, int]], select: str | list[int]) -> list[int]:
    """What the choice of tokens depends on beside the segments: for `query`, what follows the last of them."""
    return tokens[segments[-1][1] :] if segments and select == "query" else []


def salt(anchor: list[int], segments: list[tuple[int, int]], how: tuple[Any, ...], tenant: str | None) -> str:
    """The `cache_salt` of a blend. The prompt's tokens themselves are part of every key."""
    return SALT + hashlib.sha256(json.dumps([anchor, segments, how, tenant]).encode()).hexdigest()


_NO_WORKER = (
    "vLLM's workers cannot blend: start with worker_extension_cls (--worker-extension-cls) "
    '"forebay.vllm.blend.worker.BlendWorker"'
)


def shares(ratio: Any) -> list[float]:
    """A share or a threshold, or several, as a list."""
    return [float(one) for one in (ratio if isinstance(ratio, (list, tuple)) else [ratio])]


def numbers(layer: Any) -> list[int]:
    """A layer, or several, as a list."""
    return [int(one) for one in (layer if isinstance(layer, (list, tuple)) else [layer])]


#: Segments of a prompt: the server waits while they are looked up.
MOST_SEGMENTS = 256


def check_shares(ratios: Sequence[float], layers: Sequence[int], thresholds: Sequence[float] = ()) -> None:
    """`BlendError` where these shares and thresholds cannot be those of these check layers."""
    if wrong := [ratio for ratio in ratios if not 0 <= ratio <= 1]:
        raise BlendError(f"ratio is {wrong[0]}: it is a share of the segments' tokens, 0 to 1")
    if len(ratios) != len(layers) or not ratios:
        raise BlendError(f"ratio has {len(ratios)} shares, check_layer {len(layers)} layers: give one share for each layer")
    if list(layers) != sorted(set(layers)):
        raise BlendError(f"check_layer is {list(layers)}: give the layers in ascending order")
    if list(ratios) != sorted(ratios, reverse=True):
        raise BlendError(f"ratio is {list(ratios)}: a later layer computes tokens of the earlier one, so no share may be larger than the one before")
    if wrong := [threshold for threshold in thresholds if not 0 <= threshold < math.inf]:
        raise BlendError(f"threshold is {wrong[0]}: it is a share of a token's own size, 0 or more")
    if len(thresholds) not in (0, len(layers)):
        raise BlendError(f"there are {len(thresholds)} thresholds, check_layer has {len(layers)} layers: give one threshold for each layer, or none")


def check(
    tokens: list[int],
    segments: list[tuple[int, int]],
    select: str | list[int],
    ratios: list[float],
    layers: Sequence[int] = (1,),
    thresholds: Sequence[float] = (),
) -> None:
    """`BlendError` where segments, selector, shares or thresholds make no sense."""
    if not segments:
        raise BlendError("no segments: give the (start, end) of at least one, or generate from the prompt as it is")
    if len(segments) > MOST_SEGMENTS:
        raise BlendError(f"{len(segments)} segments: a prompt may have {MOST_SEGMENTS}, since each is looked up with the whole anchor before it")
    before = 0
    for start, end in segments:
        if not before <= start < end <= len(tokens):
            raise BlendError(
                f"segment ({start}, {end}) of a prompt of {len(tokens)} tokens: segments must ascend, not overlap, and end in the prompt"
            )
        before = end
    if isinstance(select, str) and select not in SELECTORS:
        raise BlendError(f"select is {reprlib.repr(select)}: use one of {', '.join(SELECTORS)}, or a list of positions")
    if select != "deviation" and len(ratios) != 1:
        raise BlendError(f"ratio has {len(ratios)} shares: several go with check layers, which select deviation alone has")
    if select != "deviation" and thresholds:
        raise BlendError("threshold is for what select deviation compares: leave it out, or select deviation")
    check_shares(ratios, layers if select == "deviation" else [1], thresholds)
    if not isinstance(select, str):
        if outside := [row for row in select if not any(start <= row < end for start, end in segments)]:
            raise BlendError(f"position {outside[0]} is to be computed anew, which lies in no segment")
    if select == "query" and segments[-1][1] >= len(tokens):
        raise BlendError("select is query, and no token follows the last segment: put the question there, or select otherwise")
