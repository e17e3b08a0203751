"""One process with one vLLM that blends, with the engine inside it so that the workers' memory can be looked at.

Usage: blending.py MODEL CACHE RESULT. Writes what it saw as JSON; test_blend.py says what it must be. Prompts are computed in pieces of 128 tokens, with
prefix caching and asynchronous scheduling.
"""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from conftest import SEED, settings
from test_damage import flip_bits
from vllm import LLM, SamplingParams

from forebay.vllm.blend import Blend, BlendError
from forebay.vllm.blend.blender import Asked
from forebay.vllm.blend.nested import pieces
from forebay.vllm.blend.segments import Rotary

#: Tokens of a block, and of a step.
BLOCK, STEP = 32, 128
#: Several check layers of the model's four, and their shares.
LAYERS, SHARES = [1, 2, 3], [0.6, 0.4, 0.1]
SOURCE = random.Random(SEED)


def tokens(count: int) -> list[int]:
    """Random token ids."""
    return [SOURCE.randrange(4, 512) for _ in range(count)]


ANCHOR, QUESTION = tokens(24), tokens(60)
#: The last one ends a block when it stands behind the anchor.
SEGMENTS = [tokens(150), tokens(131), tokens(97), tokens(232)]


def prompt_of(order: tuple[int, ...], question: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """The anchor, a few tokens, segments with a few tokens between them, and a question; with the segments' places."""
    made, places = ANCHOR + QUESTION[:10], []
    for number in order:
        made = made + QUESTION[:number]
        places.append((len(made), len(made) + len(SEGMENTS[number])))
        made = made + SEGMENTS[number]
    return made + question, places


class Server:
    """vLLM with a cache."""

    def __init__(self, model: str, cache: Path, workers: int = 1, **more: Any) -> None:
        """As a user starts it, with small steps and so many tensor-parallel workers; `more` settings of the cache."""
        transfer = {
            "kv_connector": "ForebayConnector",
            "kv_role": "kv_both",
            # What is stored is loaded, however slow the machine is at the time.
            "kv_connector_extra_config": settings(cache, recompute_tokens_per_s=1, **more),
        }
        self.llm = LLM(
            model,
            dtype="float32",
            tensor_parallel_size=workers,
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=STEP,
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
            async_scheduling=True,
            block_size=BLOCK,
            seed=0,
            disable_log_stats=False,
            skip_tokenizer_init=True,
            worker_extension_cls="forebay.vllm.blend.worker.BlendWorker",
            kv_transfer_config=transfer,
        )

    def generate(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """The tokens of an answer, and how many of the prompt's were not computed."""
        sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
        (made,) = self.llm.generate([prompt], sampling, use_tqdm=False)
        return {"tokens": list(made.outputs[0].token_ids), "cached": made.num_cached_tokens}

    def whole(self, prompt: list[int]) -> list[int]:
        """What vLLM generates where every token is computed by it."""
        assert self.llm.reset_prefix_cache()
        made = self.generate({"prompt_token_ids": prompt, "cache_salt": f"computed {SOURCE.random()}"})
        assert made["cached"] == 0
        return made["tokens"]  # type: ignore[no-any-return]

    @property
    def blender(self) -> Any:
        """The blender of the only worker."""
        return self.llm.collective_rpc(lambda worker: worker.forebay_blender)[0]


def stored(server: Server, prompt: list[int], salt: str, count: int) -> list[torch.Tensor]:
    """The bytes of a prompt's first tokens as the connector has them in its cache, by layer."""
    connector = server.blender._connector
    blocks = count // BLOCK
    bytes_of = [torch.full((blocks, layer.block_bytes), 255, dtype=torch.uint8) for layer in connector._shape.layers]
    views = connector._engine.paged_kv(bytes_of, layout="BTHD")
    loaded = connector._engine.load(prompt[:count], views, list(range(count)), extra={"cache_salt": salt}).wait()
    assert loaded.tokens == count, (loaded.tokens, count, loaded.misses)
    return bytes_of


def furthest(a: list[torch.Tensor], b: list[torch.Tensor]) -> dict[str, Any]:
    """How far two caches' numbers are apart."""
    pairs = [(x.view(torch.float32), y.view(torch.float32)) for x, y in zip(a, b, strict=True)]
    return {
        "equal": all(torch.equal(x, y) for x, y in pairs),
        "apart": max(float((x - y).abs().max()) for x, y in pairs),
        "largest": max(float(x.abs().max()) for x, _ in pairs),
    }


def exactness(server: Server, blend: Blend) -> dict[str, Any]:
    """All tokens computed anew, against vLLM's own prefill in pieces; and a segment at its stored place, nothing computed anew."""
    seen: dict[str, Any] = {}
    prompt, places = prompt_of((2, 0, 1), QUESTION)
    plain = server.whole(prompt)
    seen["plain"] = plain
    # The connector has stored vLLM's own KV of this prompt.
    exact = server.generate({"prompt_token_ids": prompt, "cache_salt": "exact"})
    seen["exact"] = exact["tokens"]
    every = blend.blend(prompt, places, ratio=1.0, select="first-k")
    seen["all"] = server.generate(every.prompt) | {"covered": every.covered}
    seen["all_bits"] = furthest(stored(server, prompt, every.salt, 384), stored(server, prompt, "exact", 384))
    # In place: the segment stands where it was stored, behind the anchor.
    prompt = ANCHOR + SEGMENTS[3] + QUESTION
    seen["in_place_plain"] = server.generate({"prompt_token_ids": prompt, "cache_salt": "exact"})["tokens"]
    here = blend.blend(prompt, [(len(ANCHOR), len(ANCHOR) + len(SEGMENTS[3]))], select="none")
    seen["in_place"] = server.generate(here.prompt) | {"covered": here.covered, "reused": here.reused}
    seen["in_place_bits"] = furthest(stored(server, prompt, here.salt, 256), stored(server, prompt, "exact", 256))
    return seen


def runs(server: Server) -> dict[str, Any]:
    """Some runs of rows, overwritten with noise and computed anew among rows that are exact, against a pass over all rows."""
    prompt, _ = prompt_of((0, 1), QUESTION)
    blender = server.blender
    nested, rows = blender._nested, [*range(37, 53), 130, 131, *range(300, 341)]
    blender.mix(Asked(prompt, [], "none", [0.0]))
    kept: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = [{}, {}]

    def keep(where: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        def seen(layer: int, at: torch.Tensor, _: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
            for number, row in enumerate(at.tolist()):
                where[layer * len(prompt) + row] = (keys[number].clone(), values[number].clone())

        return seen

    hidden = nested.forward(list(range(len(prompt))), keep(kept[0]))
    at = torch.tensor(rows)
    shape = (len(rows), blender._of.heads, blender._of.head_size)
    for layer in range(blender._of.layers):
        nested.write(layer, at, torch.randn(shape) * 3, torch.randn(shape) * 3)
    again = nested.forward(rows, keep(kept[1]))
    pairs = [(new, old) for place in kept[1] for new, old in zip(kept[1][place], kept[0][place], strict=True)]
    return {
        "rows": len(kept[1]) // blender._of.layers,
        "kv": max(float((new - old).abs().max()) for new, old in pairs),
        "hidden": float((again - hidden[at]).abs().max()),
        "largest": float(hidden.abs().max()),
    }


def layer_zero(server: Server) -> dict[str, Any]:
    """Keys and values of layer 0 of segments at other places, against fresh ones: every row."""
    prompt, places = prompt_of((1, 2, 0), QUESTION)
    blender = server.blender
    mixed = blender.mix(Asked(prompt, places, "none", [0.0], anchor=ANCHOR))
    found: dict[str, Any] = {}

    def seen(layer: int, rows: torch.Tensor, _: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        for name, fresh, loaded in (("keys", keys, mixed.rows.keys(0)[rows]), ("values", values, mixed.rows.values(0)[rows])):
            found[name] = max(found.get(name, 0.0), float((fresh - loaded).abs().max()))
        found["largest"] = float(keys.abs().max())
        return True

    blender._nested.forward([row for start, end in places for row in range(start, end)], seen)
    assert mixed.states == ["reused"] * 3, mixed.states
    return found


def dropping(server: Server) -> dict[str, Any]:
    """Several check layers, against one pass over the model's own layers that drops rows between them."""
    prompt, places = prompt_of((1, 2, 0), QUESTION)
    blender, nested = server.blender, server.blender._nested
    model, shares = nested._model.model, dict(zip(LAYERS, SHARES, strict=True))
    asked = Asked(prompt, places, "deviation", SHARES, LAYERS, ANCHOR)
    until = asked.covered(BLOCK)
    mixed = blender.mix(asked)
    stored = [of[: until // nested.block].clone() for of in nested.scratch]
    chosen = blender.blend(asked, mixed, until)
    got = [of[: until // nested.block].clone() for of in nested.scratch]
    mixed = blender.mix(asked)
    reused = {row for start, end in mixed.reused for row in range(start, end)}
    kept, count = sorted(reused), len(reused)
    rows = torch.tensor([row for row in range(until) if row in reused or row >= mixed.exact])

    def through(number: int, rows: torch.Tensor, hidden: torch.Tensor, residual: Any, seen: Any = None) -> Any:
        runs = [run for part in pieces(rows.tolist(), len(rows)) for run in part]
        with ExitStack() as handles, nested._bound(), nested._context(rows, runs):
            if seen is not None:
                hook = nested.layers[number].register_forward_pre_hook(nested._hook(number, rows, seen), with_kwargs=True)
                handles.callback(hook.remove)
            return model.layers[number](rows, hidden.clone(), None if residual is None else residual.clone())

    found: dict[int, float] = {}

    def far(layer: int, at: torch.Tensor, _: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        for number, row in enumerate(at.tolist()):
            pairs = (keys[number], mixed.rows.keys(layer)[row]), (values[number], mixed.rows.values(layer)[row])
            found[row] = sum(float(((new - old) ** 2).sum()) for new, old in pairs)

    with torch.inference_mode():
        hidden, residual = model.embed_input_ids(nested._tokens[rows]), None
        for number in range(len(model.layers)):
            if number in shares:
                # Its keys and values do not depend on what it attends to.
                before = nested.scratch[number].clone()
                through(number, rows, hidden, residual, far)
                nested.scratch[number].copy_(before)
                kept = sorted(sorted(kept, key=lambda row: -found[row])[: round(shares[number] * count)])
                stays = torch.tensor([row in kept or row not in reused for row in rows.tolist()])
                rows, hidden, residual = rows[stays], hidden[stays], residual[stays]
            hidden, residual = through(number, rows, hidden, residual)
    pairs = [(mine, of[: until // nested.block]) for mine, of in zip(got, nested.scratch, strict=True)]
    return {
        "chosen": [chosen == kept, len(chosen)],
        "apart": max(float((mine - theirs).abs().max()) for mine, theirs in pairs),
        "changed": [float((mine - old).abs().max()) for mine, old in zip(got, stored, strict=True)],
    }


def thresholds(server: Server) -> dict[str, Any]:
    """What a threshold chooses, against how far each token is, counted here."""
    prompt, places = prompt_of((1, 2, 0), QUESTION)
    blender, found = server.blender, {}
    mixed = blender.mix(Asked(prompt, places, "none", [0.0], anchor=ANCHOR))

    def far(layer: int, at: torch.Tensor, _: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        for number, row in enumerate(at.tolist() if layer == 1 else []):
            new = torch.cat([keys[number], values[number]]).double()
            old = torch.cat([mixed.rows.keys(1)[row], mixed.rows.values(1)[row]]).double()
            found[row] = (float((new - old).norm()), float(new.norm()))
        return layer == 1

    until, reused = Asked(prompt, places, "none", [0.0]).covered(BLOCK), [row for start, end in places for row in range(start, end)]
    blender._nested.forward(list(range(mixed.exact, places[-1][1])), far)
    reused = [row for row in reused if row < until]
    share = sorted(found[row][0] / found[row][1] for row in reused)
    # A threshold between two tokens' deviations, so that rounding decides nothing.
    middle = (share[len(share) // 2 - 1] + share[len(share) // 2]) / 2

    def chosen(ratios: list[float], given: list[float]) -> list[int]:
        asked = Asked(prompt, places, "deviation", ratios, LAYERS[: len(ratios)], ANCHOR, given)
        return blender.blend(asked, blender.mix(asked), until)

    over = [row for row in reused if found[row][0] >= middle * found[row][1]]
    most = sorted(reused, key=lambda row: -found[row][0])[: round(0.3 * len(reused))]
    return {
        "share": [share[0], middle, share[-1]],
        "all": [chosen([1.0], [middle]) == over, len(over), len(reused)],
        "some": [chosen([0.3], [middle]) == sorted({*over} & {*most}), len({*over} & {*most}), len(most)],
        "none": chosen([1.0], [100.0]),
        "later": chosen([1.0, 1.0], [100.0, 0.0]) + chosen([1.0, 1.0], [0.0, 100.0]),
        "first": chosen([1.0, 1.0], [middle, 0.0]) == over,
    }


def arms(server: Server, blend: Blend) -> dict[str, Any]:
    """Each selector, and a second order of the same segments; then the plain prompt again."""
    seen: dict[str, Any] = {}
    prompt, places = prompt_of((1, 2, 0), QUESTION)
    plain = server.whole(prompt)
    for select in ("none", "first-k", "query", "deviation"):
        blended = blend.blend(prompt, places, select=select, ratio=0.15)
        again = blend.blend(prompt, places, select=select, ratio=0.15)
        seen[select] = server.generate(blended.prompt) | {
            "covered": blended.covered,
            "states": [one.state for one in blended.segments],
            "reused": blended.reused,
            "recomputed": blended.recomputed,
            "again": again.was_there and again.salt == blended.salt,
        }
    layered = blend.blend(prompt, places, select="deviation", ratio=SHARES, check_layer=LAYERS)
    seen["layers"] = server.generate(layered.prompt) | {"recomputed": layered.recomputed, "reused": layered.reused}
    every = blend.blend(prompt, places, select="deviation", ratio=[1, 1.0, 1], check_layer=(1, 2, 3))
    seen["layers, all"] = server.generate(every.prompt)["tokens"] == plain
    bounded = blend.blend(prompt, places, select="deviation", ratio=1.0, threshold=100)
    seen["threshold"] = {"recomputed": bounded.recomputed, "other": bounded.salt != blend.blend(prompt, places, select="deviation", ratio=1.0).salt}
    seen["full ratio"] = {
        select: server.generate(blend.blend(prompt, places, select=select, ratio=1.0).prompt)["tokens"] == plain
        for select in ("first-k", "query", "deviation")
    }
    seen["plain"] = plain
    # In vLLM's prefix cache and in Forebay there is blended KV of these very tokens now.
    seen["afterwards"] = server.generate({"prompt_token_ids": prompt})
    # What was computed is stored after the answer, on a busy machine some time after.
    by = time.monotonic() + 30
    while True:
        assert server.llm.reset_prefix_cache()
        seen["from the cache"] = server.generate({"prompt_token_ids": prompt})
        if seen["from the cache"]["cached"] > 0 or time.monotonic() > by:
            return seen


def holes(server: Server, blend: Blend, cache: Path) -> dict[str, Any]:
    """Segments that cannot be reused are computed: the answer is vLLM's own."""
    seen: dict[str, Any] = {}
    prompt, places = prompt_of((0, 2), QUESTION)
    plain = server.whole(prompt)

    def tried(name: str, tenant: str) -> None:
        blended = blend.blend(prompt, places, select="none", cache_salt=tenant)
        made = server.generate(blended.prompt)
        seen[name] = {"states": [one.state for one in blended.segments], "right": made["tokens"] == plain, "cached": made["cached"]}

    # Keys that are turned the wrong way, or with their elements paired wrongly: the gate must
    # notice.
    segments = server.blender._segments
    rotary = segments._rotary
    half = rotary[0].table.shape[1] // 2
    wrong_sign = torch.cat([rotary[0].table[:, :half], -rotary[0].table[:, half:]], 1)
    segments._rotary = [Rotary(wrong_sign, of.is_neox, of.layers) for of in rotary]
    tried("wrong sign", "a")
    segments._rotary = [Rotary(of.table, not of.is_neox, of.layers) for of in rotary]
    tried("wrong pairs", "b")
    segments._rotary = rotary
    tried("right", "c")
    other = Blend(server.llm, ANCHOR[:8])
    seen["other anchor"] = [one.state for one in other.blend(prompt, places, select="none", cache_salt="d").segments]
    server.blender._segments._engine.flush()
    (space,) = [folder for folder in cache.rglob("*") if folder.is_dir() and folder.name == segments_space(server)]
    flip_bits(space)
    tried("flipped", "e")
    server.blender._segments._engine.clear()
    tried("missing", "f")
    return seen


def segments_space(server: Server) -> str:
    """The folder of the namespace of segments."""
    return str(server.blender._segments._engine.geometry.namespace)


def refused(blend: Blend) -> dict[str, str]:
    """The errors of arguments that make no sense."""
    prompt = tokens(100)
    asked: dict[str, dict[str, Any]] = {
        "none": {"segments": []},
        "order": {"segments": [(50, 80), (10, 20)]},
        "end": {"segments": [(50, 101)]},
        "selector": {"segments": [(10, 20)], "select": "best"},
        "ratio": {"segments": [(10, 20)], "ratio": 1.5},
        "outside": {"segments": [(10, 20)], "select": [25]},
        "question": {"segments": [(10, 100)], "select": "query"},
        "layer": {"segments": [(0, 40)], "select": "deviation", "check_layer": 9},
        "shares": {"segments": [(0, 40)], "select": "deviation", "ratio": [0.3, 0.1]},
        "descending": {"segments": [(0, 40)], "select": "deviation", "ratio": [0.3, 0.1], "check_layer": [2, 1]},
        "growing": {"segments": [(0, 40)], "select": "deviation", "ratio": [0.1, 0.3], "check_layer": [1, 2]},
        "several": {"segments": [(0, 40)], "select": "first-k", "ratio": [0.3, 0.1]},
        "last layer": {"segments": [(0, 40)], "select": "deviation", "ratio": [0.3, 0.1], "check_layer": [1, 4]},
        "threshold": {"segments": [(0, 40)], "select": "deviation", "threshold": -0.1},
        "thresholds": {"segments": [(0, 40)], "select": "deviation", "threshold": [0.1, 0.1]},
        "compared": {"segments": [(0, 40)], "select": "first-k", "threshold": 0.1},
        "short": {"segments": [(2, 9)], "select": "none", "tokens": prompt[:20]},
        "long": {"segments": [(2, 9)], "select": "none", "tokens": tokens(1100)},
    }
    said = {}
    for name, more in asked.items():
        try:
            blend.blend(**({"tokens": prompt} | more))
            said[name] = ""
        except BlendError as error:
            said[name] = str(error)
    return said


def main() -> None:
    """Runs all of it."""
    model, cache, result = sys.argv[1:]
    server = Server(model, Path(cache))
    blend = Blend(server.llm, ANCHOR)
    seen: dict[str, Any] = {"stored": [[blend.has(s), blend.store(s), blend.store(s), blend.has(s)] for s in SEGMENTS]}
    seen["exactness"] = exactness(server, blend)
    seen["runs"] = runs(server)
    seen["layer zero"] = layer_zero(server)
    seen["dropping"] = dropping(server)
    seen["thresholds"] = thresholds(server)
    seen["arms"] = arms(server, blend)
    seen["refused"] = refused(blend)
    seen["holes"] = holes(server, blend, Path(cache))
    Path(result).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
