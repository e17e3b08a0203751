"""Which requests are blended, and how: the part of live blending that lives in vLLM's scheduler. It
touches no KV.

A request that names its segments, or asks for those between separators, is planned when it arrives:
it gets a `cache_salt` of its blend, and vLLM's block hashes are made anew with it. So vLLM's prefix
cache gives blended blocks to requests with the same salt alone, and the connector neither loads nor
stores anything for it. When a worker reports that the blend failed, the request gets its own salt
back, and is computed, loaded and stored like any other.

Invariant: a request whose hashes do not change with its salt is not blended.
"""

from __future__ import annotations

import logging
import reprlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forebay._quiet import Quiet
from forebay.vllm import extra
from forebay.vllm.blend import client, separator
from forebay.vllm.blend.blender import Asked
from forebay.vllm.blend.live import Job

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from forebay.vllm.settings import Settings

logger = logging.getLogger("vllm.forebay")

#: In a request's `kv_transfer_params`. Either asks for a blend: true for the segments between
#: separators, or the segments' places in its tokens.
BLEND = "forebay.blend"
#: Places, and what else a blend may have.
SEGMENTS, SELECT, RATIO, THRESHOLD, STORES = (
    "forebay.segments",
    "forebay.blend_select",
    "forebay.blend_ratio",
    "forebay.blend_threshold",
    "forebay.store_segments",
)
#: How many of the first tokens the segments are stored behind; without it all that stand before the
#: first segment.
ANCHOR = "forebay.blend_anchor"
#: Of what is logged of a request that makes no sense.
MOST_LETTERS = 300


@dataclass
class _Plan:
    request: Request
    asked: Asked
    covered: int
    stores: bool
    tenant: str | None
    """The request's own salt."""
    computed: int = 0
    """Tokens that vLLM had of it when it last asked."""


class _NotSeparated(Exception):
    """No segment stands between separators: no fault of the request, whose prompt may have none."""


@dataclass
class Reported:
    """What remains of a report of loads when those of blends are taken out, and requests that are
    to be computed."""

    over: set[str]
    computed: list[Request] = field(default_factory=list)


class Planner:
    """One per scheduler."""

    def __init__(self, vllm_config: VllmConfig, block_tokens: int, settings: Settings) -> None:
        """For a server that `refuse.live` lets through; `ValueError` for settings that make no
        sense."""
        self._select, self._ratios, self._layers, self._thresholds = defaults(settings)
        text = settings.resolved[separator.KEY]
        self._separator = [] if text is None else separator.of_server(vllm_config.model_config, text)
        self._block, self._hashes = block_tokens, bool(vllm_config.cache_config.enable_prefix_caching)
        self._plans: dict[str, _Plan] = {}
        self._loading: set[str] = set()
        self._jobs: list[Job] = []
        self._counts: Counter[str] = Counter()
        self._quiet = Quiet(logger)

    def takes(self, request: Request) -> bool:
        """Whether a new request is blended; from then on it is this planner's."""
        params = request.kv_transfer_params or {}
        if SEGMENTS not in params and params.get(BLEND, False) is False:
            return False
        try:
            asked = self._asked(params, request.prompt_token_ids or [])
        except _NotSeparated:
            return self._refused("separator")
        except (client.BlendError, TypeError, ValueError) as error:
            # Some of these errors have what the client sent in them, whatever its size.
            self._quiet.warn("invalid", "request %s is computed: %s", request.request_id, str(error)[:MOST_LETTERS])
            return self._refused("invalid")
        covered = asked.covered(self._block)
        if covered == 0:
            return self._refused("short")
        # A request for which nothing may be loaded is not blended either.
        if extra.skips(request)[1] or request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
            return self._refused("skipped")
        plan = _Plan(request, asked, covered, bool(params.get(STORES)), request.cache_salt)
        question = client.question(asked.tokens, asked.segments, asked.select)
        how = (asked.select, asked.ratios, asked.check_layers, asked.thresholds, question)
        before = list(request.block_hashes)
        _salted(request, client.salt(asked.anchor, asked.segments, how, plan.tenant))
        if (before or self._hashes) and not _differ(before, request.block_hashes):
            _salted(request, plan.tenant)
            return self._refused("salt")
        self._plans[request.request_id] = plan
        return True

    def _refused(self, why: str) -> bool:
        self._counts[f"blend_computed_{why}"] += 1
        return False

    def _asked(self, params: dict[str, Any], tokens: list[int]) -> Asked:
        places = self._places(params, tokens)
        select = params.get(SELECT, self._select)
        if not isinstance(select, str):
            raise client.BlendError(f"{SELECT} is {reprlib.repr(select)}: use one of {', '.join(client.SELECTORS)}")
        # Several shares in the settings are for `deviation`; other selectors take the first.
        compares = select == "deviation"
        ratios = client.shares(params.get(RATIO, self._ratios if compares else self._ratios[:1]))
        thresholds = client.shares(params.get(THRESHOLD, self._thresholds if compares else []))
        client.check(tokens, places, select, ratios, self._layers, thresholds)
        if SEGMENTS not in params and select == "query" and tokens[-len(self._separator) :] == self._separator:
            raise client.BlendError(f"{SELECT} is query, and no token follows the last separator: put the question there, or select otherwise")
        behind = _whole(ANCHOR, params.get(ANCHOR, places[0][0]))
        if not 0 <= behind <= places[0][0]:
            raise client.BlendError(f"{ANCHOR} is {behind}: the first segment begins at {places[0][0]}, and the anchor ends there or before")
        return Asked(list(tokens), places, select, ratios, self._layers, list(tokens[:behind]), thresholds)

    def _places(self, params: dict[str, Any], tokens: list[int]) -> list[tuple[int, int]]:
        if SEGMENTS in params:
            return [(_whole(SEGMENTS, start), _whole(SEGMENTS, end)) for start, end in params[SEGMENTS]]
        if params[BLEND] is not True:
            raise client.BlendError(f"{BLEND} is {reprlib.repr(params[BLEND])}: use true or false")
        if not self._separator:
            raise client.BlendError(f"{BLEND} without {SEGMENTS}: set {separator.KEY}, or say where the segments are")
        if not (places := separator.segments(tokens, self._separator)):
            raise _NotSeparated
        return places

    def has(self, req_id: str) -> bool:
        """Whether this request is blended."""
        return req_id in self._plans

    def matched(self, req_id: str, computed: int) -> tuple[int, bool]:
        """Tokens beyond `computed` that a blend gives, and whether between steps."""
        plan = self._plans[req_id]
        plan.computed = computed
        tokens = max(0, plan.covered - computed)
        return tokens, tokens > 0

    def allocated(self, req_id: str, blocks: list[int], tokens: int) -> None:
        """vLLM gave the request these blocks, the last of them for `tokens` to blend."""
        if tokens == 0:
            return
        plan = self._plans[req_id]
        first, end = plan.computed // self._block, (plan.computed + tokens) // self._block
        self._loading.add(req_id)
        self._jobs.append(Job(req_id, plan.asked, plan.computed + tokens, first, list(blocks[first:end]), plan.stores))

    @property
    def is_blending(self) -> bool:
        """Whether a blend is ordered, and not reported as over."""
        return bool(self._loading)

    def jobs(self) -> tuple[Job, ...]:
        """What the workers begin in this step."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def reported(self, over: Iterable[str], failed: Iterable[str]) -> Reported:
        """Takes blends out of a report of loads."""
        over, failed = set(over), set(failed)
        mine = over & self._loading
        self._loading -= mine
        rest = Reported(over - mine)
        for req_id in failed & mine:
            # The plan of an aborted request is gone.
            if (plan := self._plans.pop(req_id, None)) is not None:
                _salted(plan.request, plan.tenant)
                rest.computed.append(plan.request)
        return rest

    def finished(self, req_id: str) -> None:
        """A request is over."""
        self._plans.pop(req_id, None)

    def clear(self) -> None:
        """Gives up all blends that the workers have not begun."""
        self._plans.clear()

    def counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        grown, self._counts = dict(self._counts), Counter()
        return grown


def defaults(settings: Settings) -> tuple[str, list[float], list[int], list[float]]:
    """Selector, shares, layers to compare and thresholds that the settings ask for."""
    layers, ratios, thresholds = (settings.resolved[f"blend_{name}"] for name in ("check_layers", "recompute_ratios", "thresholds"))
    shares, compared = client.shares(ratios or [0.15]), client.numbers(layers or [1])
    try:
        client.check_shares(shares, compared, thresholds)
    except client.BlendError as error:
        raise ValueError(f"blend_recompute_ratios is {ratios}, blend_check_layers {layers}, blend_thresholds {thresholds}: {error}") from error
    return "deviation" if layers else "query", shares, compared, list(thresholds)


def _whole(key: str, value: Any) -> int:
    if not isinstance(value, int):
        raise client.BlendError(f"{key} has {reprlib.repr(value)}: give whole numbers of tokens")
    return value


def _salted(request: Request, salt: str | None) -> None:
    """Gives the request another salt, and vLLM's block hashes of it."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()


def _differ(before: list[bytes], after: list[bytes]) -> bool:
    return len(before) == len(after) > 0 and all(a != b for a, b in zip(before, after))
