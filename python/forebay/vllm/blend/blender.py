"""Blends a prompt: stored segments at new positions, chosen tokens computed anew among them,
everything else computed.

A segment that is missing, whose load fails or that the gate refuses is a hole: its tokens are
computed like those between segments.

The gate: a key and a value of layer 0 depend on their own token alone, so what was loaded and
turned must be what the model computes there, but for rounding. A few tokens of each segment are
compared on every use. It catches a wrong rotation, rows in a wrong order and KV of another model.

Work is divided into `Steps`: a running server takes them one by one, a script all at once.

With tensor parallelism every worker blends its own heads. They agree on what they have found,
loaded and chosen (`ranks.py`): a segment is reused by all of them or by none.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from forebay._quiet import Quiet
from forebay.vllm import geometry, identity
from forebay.vllm.blend import refuse, selection
from forebay.vllm.blend.nested import Nested, Steps, finish, pieces
from forebay.vllm.blend.ranks import Ranks
from forebay.vllm.blend.segments import Chain, Dimensions, Rotary, Rows, Segments, stream

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from forebay.vllm.settings import Settings

T = TypeVar("T")
logger = logging.getLogger("vllm.forebay")

#: How far a turned key may be from a fresh one, as a share of the largest fresh one. A float32
#: rotation is off by 1e-5; in 16 bits the table, the stored and the turned key are each rounded.
TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 6e-2}


@dataclass(frozen=True)
class Asked:
    """A prompt to blend; the fields are the arguments of `Blend.blend`."""

    tokens: list[int]
    segments: list[tuple[int, int]]
    select: str | list[int]
    ratios: list[float]
    """One share, or with `deviation` one for each check layer."""
    check_layers: list[int] = field(default_factory=lambda: [1])
    anchor: list[int] = field(default_factory=list)
    """Tokens that the segments are stored behind."""
    thresholds: list[float] = field(default_factory=list)
    """None, or one for each check layer."""

    def covered(self, block: int) -> int:
        """Tokens from the start that are blended: whole blocks up to the end of the last segment,
        and never the prompt's last token, from which the server computes the next one."""
        return min(-(-self.segments[-1][1] // block), (len(self.tokens) - 1) // block) * block


class NotStored(ValueError):
    """The computed KV could not be stored on some worker; raised on all of them."""


@dataclass
class Mixed:
    """A prompt's KV in the scratch memory, before anything is computed anew."""

    rows: Rows
    states: list[str] = field(default_factory=list)
    reused: list[tuple[int, int]] = field(default_factory=list)
    exact: int = 0
    """First rows whose KV is loaded and exact: those of the anchor, where the prompt begins with
    it."""


class Blender:
    """One per worker; works on one prompt at a time, between the server's steps."""

    def __init__(self, runner: Any, connector: Connector) -> None:
        """Opens the namespace of segments beside the connector's; `Unsupported` where this server
        cannot blend."""
        import forebay

        config = runner.vllm_config
        refuse.configuration(config)
        refuse.runner(runner)
        self._nested, self._connector = Nested(runner), connector
        self._most_tokens = config.model_config.max_model_len
        self._of = _dimensions(self._nested, config.model_config.dtype)
        rotary = _rotary(runner.get_model(), self._nested.names)
        self.ranks = Ranks()
        made = Segments.geometry(config.model_config.model, identity.fingerprint(config, ""), self._of, (self.ranks.rank, self.ranks.count))
        # No server fetches segments, so none is uploaded.
        settings = self._connector.settings.engine | {"remote_url": "none"}
        engine = forebay.Engine(settings, made, device=self._nested.device)
        self._segments = Segments(engine, self._of, rotary)
        #: How long a server's request waits for a segment.
        self.limit_ms: int = self._connector.settings.resolved["load_timeout_ms"]
        self._quiet = Quiet(logger)

    def close(self) -> None:
        """Closes the namespace of segments."""
        self._segments.close()

    def chains(self, anchor: list[int], segments: list[list[int]]) -> list[Chain]:
        """The segments behind their anchor, hashed."""
        return self._segments.chains(anchor, segments)

    def chains_of(self, asked: Asked) -> list[Chain]:
        """Those of a prompt."""
        return self.chains(asked.anchor, [asked.tokens[start:end] for start, end in asked.segments])

    def has(self, chains: list[Chain]) -> list[bool]:
        """Of each segment, whether all workers have stored it."""
        return self.ranks.all([self._segments.has(chain) for chain in chains])

    def store(self, anchor: list[int], segment: list[int]) -> int:
        """Computes and stores a segment; how many tokens were computed."""
        if not segment:
            raise ValueError("a segment without tokens; give at least one")
        self._check_length(len(anchor + segment))
        (stored,) = finish(self.storing(self.chains(anchor, [segment]))) or (None,)
        if stored is not None and stored[1] is not None:
            raise NotStored(f"a segment of {len(segment)} tokens was not stored: {stored[1]}")
        return 0 if stored is None else len(anchor + segment)

    def storing(self, chains: list[Chain]) -> Steps[list[tuple[int, str | None]]]:
        """Computes and stores those that are missing, all behind one anchor: the length of each, and
        why it was not stored.

        The anchor is computed once, with the first: whatever a request asks for, it costs no more
        than its prompt has tokens.
        """
        missing = [chain for chain, has in zip(chains, self.has(chains), strict=True) if not has]
        done: list[tuple[int, str | None]] = []
        if not missing:
            return done
        # Memory for the longest of them at once, so that the anchor in it is kept for all.
        longest = max(missing, key=len)
        self._begin(longest.tokens)
        rows, first = self._rows(len(longest)), 0
        for chain in missing:
            self._begin(chain.tokens)
            yield from self._nested.steps(
                list(range(first, len(chain))), lambda layer, at, _, keys, values: rows.put(layer, at, (keys, values))
            )
            stored = yield from self._over(self._segments.store(chain, rows))
            done.append((len(chain.segment), self._stored(stored)))
            first = len(chain.anchor)
        return done

    def _over(self, work: Future[T]) -> Steps[T]:
        """What comes of work of another thread, once it is over on all workers. A step does not wait
        for it: other requests are computed meanwhile."""
        try:
            while self.ranks.all([work.done()]) == [False]:
                yield 0
        finally:
            # Where the steps are given up: what has not begun need not begin.
            work.cancel()
        return work.result()

    def blend_and_store(self, asked: Asked, salt: str) -> dict[str, Any]:
        """Blends a prompt and stores it, as far as whole blocks of the server, under `salt` in the
        connector's namespace."""
        self._check_length(len(asked.tokens))
        self.check_layers(asked.select, asked.check_layers)
        block = self._connector.block_tokens
        covered = asked.covered(block)
        if covered == 0:
            raise ValueError(f"a prompt of {len(asked.tokens)} tokens has no whole block of {block}; nothing could be loaded for it")
        prompt = asked.tokens[:covered]
        if self.ranks.all([self._connector.has(prompt, salt)]) == [True]:
            return {"covered": covered, "states": [], "reused": 0, "recomputed": 0, "was_there": True}
        mixed = self.mix(asked)
        chosen = self.blend(asked, mixed, covered)
        reused = sum(min(end, covered) - start for start, end in mixed.reused if start < covered)
        caches = dict(zip(self._nested.names, self._nested.scratch, strict=True))
        if (why := self._stored(self._connector.store(prompt, caches, salt))) is not None:
            raise NotStored(f"a blended prompt of {covered} tokens was not stored: {why}")
        return {
            "covered": covered,
            "states": mixed.states,
            "reused": reused - len(chosen),
            "recomputed": len(chosen),
            "was_there": False,
        }

    def _stored(self, why: str | None) -> str | None:
        """None where all workers have stored it, otherwise why not."""
        (everywhere,) = self.ranks.all([why is None])
        return None if everywhere else why or "another worker did not store its part; its log says why"

    def check_layers(self, select: str | list[int], layers: list[int]) -> None:
        """`ValueError` where a layer to compare is none of this model's."""
        if select == "deviation" and (wrong := [layer for layer in layers if not 0 < layer < self._of.layers]):
            raise ValueError(f"check_layer is {wrong[0]}: of {self._of.layers} layers it may be 1 to {self._of.layers - 1}")

    def mix(self, asked: Asked) -> Mixed:
        """Loads the prompt's segments into the scratch memory; holes are not computed yet."""
        chains = self.chains_of(asked)
        return finish(self.mixing(asked, chains, self.has(chains), None))

    def mixing(self, asked: Asked, chains: list[Chain], found: list[bool], limit_ms: int | None) -> Steps[Mixed]:
        """`mix` in steps, of segments of which `found` are stored. A segment that is not loaded
        within `limit_ms` is computed."""
        import torch

        self._begin(asked.tokens)
        mixed = Mixed(self._rows(len(asked.tokens)))
        behind = len(asked.anchor)
        # Where the prompt begins with the anchor, its KV is loaded with the first segment found.
        wants_anchor = 0 < behind <= asked.segments[0][0] and asked.tokens[:behind] == asked.anchor if asked.segments else False
        loads: list[tuple[Future[bool] | None, bool]] = []
        for (start, _), chain, there in zip(asked.segments, chains, found, strict=True):
            begun = self._segments.begin(chain, mixed.rows, start, wants_anchor, limit_ms) if there else None
            loads.append((begun, there and wants_anchor))
            wants_anchor = wants_anchor and not there
        try:
            for (start, end), (loading, has_anchor) in zip(asked.segments, loads, strict=True):
                if loading is None:
                    state = "missing"
                elif self.ranks.all([(yield from self._over(loading))]) == [False]:
                    state = "failed"
                elif self.ranks.all([(yield from self._gate(mixed.rows, start, end))]) == [False]:
                    state = "gate"
                else:
                    state = "reused"
                mixed.states.append(state)
                if state == "reused":
                    mixed.reused.append((start, end))
                    mixed.exact = behind if has_anchor else mixed.exact
                else:
                    logger.debug("segment of %d tokens at %d is computed: %s", end - start, start, state)
        finally:
            # Where the steps are given up: loads that have not begun need not begin.
            for loading, _ in loads:
                if loading is not None:
                    loading.cancel()
        self._report(mixed.states)
        loaded = [row for start, end in [(0, mixed.exact), *mixed.reused] for row in range(start, end)]
        for start, end in (run for part in pieces(loaded, len(loaded)) for run in part):
            rows = torch.arange(start, end, device=self._nested.device)
            for layer in range(self._of.layers):
                self._nested.write(layer, rows, mixed.rows.keys(layer)[start:end], mixed.rows.values(layer)[start:end])
        return mixed

    def _report(self, states: list[str]) -> None:
        """One line for a blend some of whose segments are computed."""
        if computed := Counter(state for state in states if state != "reused"):
            causes = ", ".join(f"{count} {state}" for state, count in sorted(computed.items()))
            self._quiet.warn(" ".join(sorted(computed)), "of %d segments of a blend these are computed: %s", len(states), causes)

    def blend(self, asked: Asked, mixed: Mixed, until: int) -> list[int]:
        """Computes holes and chosen tokens up to `until`; the chosen tokens, which are a share of
        the reused ones below `until`."""
        return finish(self.blending(asked, mixed, until))

    def blending(self, asked: Asked, mixed: Mixed, until: int) -> Steps[list[int]]:
        """`blend` in steps."""
        choice = [(start, min(end, until)) for start, end in mixed.reused if start < until]
        holes = _holes([(0, mixed.exact), *mixed.reused], max(until, asked.segments[-1][1]))
        chosen = yield from self._choose(asked, mixed, choice, holes)
        yield from self._nested.steps([row for row in sorted({*holes, *chosen}) if row < until])
        return chosen

    def copy_to(self, blocks: list[int], first: int) -> None:
        """Copies the prompt's blocks from number `first` on into these blocks of the server."""
        split = self._connector.block_tokens // self._nested.block
        self._nested.copy_to([block * split + part for block in blocks for part in range(split)], first * split)

    def forward(self, rows: list[int]) -> torch.Tensor | None:
        """Hidden states of rows of the prompt at hand, from the KV that the scratch memory has
        now."""
        return self._nested.forward(rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of these hidden states."""
        return self._nested.logits(hidden)

    def _choose(self, asked: Asked, mixed: Mixed, choice: list[tuple[int, int]], holes: list[int]) -> Steps[list[int]]:
        rows = [row for start, end in choice for row in range(start, end)]
        if isinstance(asked.select, list):
            return sorted({*asked.select} & {*rows})
        if asked.select == "none" or asked.ratios[0] == 0 or not rows:
            return []
        if asked.select == "first-k":
            return selection.first(choice, asked.ratios[0])
        if asked.select == "deviation":
            return (yield from self._deviating(asked, mixed, rows, holes))
        # Scores of this worker's heads; the sum over all workers decides.
        scores = yield from self._attention(asked, mixed, holes)
        return selection.largest(self.ranks.total(scores.cpu()), rows, selection.budget(len(rows), asked.ratios[0]))

    def _deviating(self, asked: Asked, mixed: Mixed, rows: list[int], holes: list[int]) -> Steps[list[int]]:
        """Those of `rows` that are computed to the last layer.

        Each check layer keeps at most its share of them, and only those that deviate by its
        threshold. Between two check layers only the rows that the first kept are computed. So rows
        that the second drops have computed KV below it, and their stored KV from it on. Each pass
        begins at layer 0 again, and gives its rows the same KV there as before.
        """
        chosen = rows
        # All reused rows, not only those that may be chosen: later rows attend to them too.
        computed = [row for start, end in mixed.reused for row in range(start, end)]
        thresholds = asked.thresholds or [0.0] * len(asked.ratios)
        for layer, ratio, threshold in zip(asked.check_layers, asked.ratios, thresholds, strict=True):
            count = selection.budget(len(rows), ratio)
            if chosen and (count < len(chosen) or threshold > 0):
                scores = yield from self._deviations(mixed, layer, computed, holes)
                both = self.ranks.total(scores.cpu())
                chosen = selection.beyond(both, selection.largest(both[0], chosen, count), threshold)
                computed = chosen
        return chosen

    def _deviations(self, mixed: Mixed, check: int, computed: list[int], holes: list[int]) -> Steps[torch.Tensor]:
        """How far the rows' KV in the check layer is from the stored one. The layers before it are
        computed for these rows and for holes among them, and keep that KV."""
        import torch

        end = max(computed) + 1
        scores = torch.zeros(2, end, device=self._nested.device)

        def seen(layer: int, rows: torch.Tensor, _: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
            if layer == check:
                stored = mixed.rows.keys(layer)[rows], mixed.rows.values(layer)[rows]
                scores[:, rows] = selection.deviation((keys, values), stored)
            return layer == check

        yield from self._nested.steps(sorted({*computed, *(row for row in holes if row < end)}), seen)
        return scores

    def _attention(self, asked: Asked, mixed: Mixed, holes: list[int]) -> Steps[torch.Tensor]:
        """What follows the last segment is computed once to see what it attends to."""
        import torch

        last = asked.segments[-1][1]
        mass = torch.zeros(len(asked.tokens), device=self._nested.device)

        def seen(layer: int, rows: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
            mixed.rows.put(layer, rows, (keys, values))
            # Not read from `rows`: the host would wait for a GPU in every layer.
            places, end = self._nested.runs, self._nested.runs[-1][1]
            if end > last:
                asking = sum(min(to, last) - start for start, to in places if start < last)
                first = min(max(start, last) for start, to in places if to > last)
                scale = self._nested.layers[layer].impl.scale
                mass[:end] += selection.attention(queries[asking:], mixed.rows.keys(layer)[:end], first, scale)
            # The last layer's output is of no use: holes are computed again with the chosen tokens.
            return layer == self._of.layers - 1

        yield from self._nested.steps(sorted({*(row for row in holes if row < last), *range(last, len(asked.tokens))}), seen)
        return mass

    def _gate(self, rows: Rows, start: int, end: int) -> Steps[bool]:
        """Whether layer 0 of the segment is what the model computes for the tokens at its ends and
        in its middle."""
        import torch

        sample = sorted({start, (start + end) // 2, end - 1})
        ok = True

        def seen(layer: int, at: torch.Tensor, _: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
            nonlocal ok
            pairs = ((keys.float(), rows.keys(0)[at].float()), (values.float(), rows.values(0)[at].float()))
            tolerance = TOLERANCE[self._of.type_name]
            # False for NaN too.
            close = [(fresh - loaded).abs().max() <= tolerance * fresh.abs().max() for fresh, loaded in pairs]
            ok = ok and bool(torch.stack(close).all())
            return True

        yield from self._nested.steps(sample, seen)
        return ok

    def _begin(self, tokens: list[int]) -> None:
        blocks = -(-len(tokens) // self._connector.block_tokens)
        self._allocated(lambda: self._nested.begin(tokens, blocks * self._connector.block_tokens // self._nested.block))

    def _rows(self, tokens: int) -> Rows:
        return self._allocated(lambda: Rows(self._of, tokens, self._nested.device))

    def _allocated(self, allocate: Callable[[], T]) -> T:
        """What all workers have memory for; `ValueError` on all of them where one has none."""
        import torch

        made, failed = None, None
        try:
            made = allocate()
        except (MemoryError, torch.OutOfMemoryError) as error:
            failed = error
        if self.ranks.all([failed is None]) == [False]:
            raise ValueError(f"there is no memory for this blend: {failed or 'on another worker'}") from failed
        return cast(T, made)

    def _check_length(self, tokens: int) -> None:
        if tokens > self._most_tokens:
            raise ValueError(f"{tokens} tokens, with the anchor, are more than the {self._most_tokens} of max_model_len")


class Connector:
    """The part of the running connector that a blended prompt is stored through."""

    def __init__(self, engine: Any, shape: geometry.Shape, settings: Settings) -> None:
        """The worker's engine, what it stores, and its settings."""
        refuse.groups(len(shape.block_tokens))
        self._engine, self._shape, self.settings = engine, shape, settings
        (self.block_tokens,) = shape.block_tokens

    def has(self, tokens: list[int], salt: str) -> bool:
        """Whether all of this is stored under this salt."""
        return bool(self._engine.lookup(tokens, _extra(salt)) >= len(tokens))

    def store(self, tokens: list[int], caches: dict[str, torch.Tensor], salt: str) -> str | None:
        """Stores KV that lies from block 0 on, as the connector itself would; why not, where it is
        not stored."""
        shape = dataclasses.replace(self._shape, num_blocks=_server_blocks(self._shape, caches))
        views = self._engine.paged_kv([of.view for of in geometry.views(shape, caches)], layout="BTHD")
        store = self._engine.store(
            tokens,
            views,
            list(range(len(tokens))),
            extra=_extra(salt),
            stream=stream(caches[self._shape.layers[0].name].device),
            save_unfull=True,
            wait_for_staging=True,
        )
        result = store.wait()
        return None if self.has(tokens, salt) else f"the cache took {result.stored} chunks: {result.sheds or 'see the log of forebay'}"


def _server_blocks(shape: geometry.Shape, caches: dict[str, torch.Tensor]) -> int:
    layer = shape.layers[0]
    tensor = caches[layer.name]
    return tensor.numel() * tensor.element_size() // layer.block_bytes


def _extra(salt: str) -> dict[str, str]:
    return {"cache_salt": salt}


def running_connector() -> Connector:
    """The connector of this process's worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from forebay.vllm.connector import ForebayConnector

    group = get_kv_transfer_group()
    if not isinstance(group, ForebayConnector):
        raise geometry.Unsupported(f"blending does not work with {type(group).__name__}; use ForebayConnector alone")
    return Connector(*group.for_blending())


def _dimensions(nested: Nested, dtype: torch.dtype) -> Dimensions:
    sizes = {(layer.num_kv_heads, layer.head_size, getattr(layer, "head_size_v", layer.head_size)) for layer in nested.layers}
    if len(sizes) != 1 or (size := sizes.pop())[1] != size[2]:
        raise geometry.Unsupported("blending does not work with layers whose KV differs in size; use a model with equal layers")
    return Dimensions(len(nested.layers), size[0], size[1], dtype)


def _rotary(model: Any, names: list[str]) -> list[Rotary]:
    """The rotary tables of the layers, each with the layers that use it."""
    modules = dict(model.named_modules())
    found: dict[int, Rotary] = {}
    for number, name in enumerate(names):
        # An attention layer's rotary embedding is its sibling.
        rope = getattr(modules.get(name.rpartition(".")[0]), "rotary_emb", None)
        table, width = getattr(rope, "cos_sin_cache", None), getattr(rope, "rotary_dim", None)
        if table is None or table.dim() != 2 or table.shape[1] != width:
            what = "no rotary embedding" if rope is None else f"a rotary embedding of kind {type(rope).__name__}"
            raise geometry.Unsupported(f"blending does not work with {name}, which has {what}; use a model with plain rotary positions")
        found.setdefault(id(rope), Rotary(table.contiguous(), bool(rope.is_neox_style), [])).layers.append(number)
    return list(found.values())


def _holes(reused: list[tuple[int, int]], until: int) -> list[int]:
    """The rows below `until` that no reused segment has."""
    covered = {row for start, end in reused for row in range(start, end)}
    return [row for row in range(until) if row not in covered]
