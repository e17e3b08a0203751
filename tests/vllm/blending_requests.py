"""One process with one vLLM whose requests are blended, with the engine inside it so that blocks
can be looked at.

Usage: blending_requests.py MODEL CACHE RESULT. Writes what it saw as JSON; test_blend_requests.py
says what it must be. Prompts are computed in pieces of 128 tokens, with prefix caching and
asynchronous scheduling.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from blending import ANCHOR, BLOCK, QUESTION, SEGMENTS, STEP, Server, furthest, prompt_of, tokens
from test_damage import flip_bits
from vllm import SamplingParams

from forebay.vllm.blend import Blend, BlendError
from forebay.vllm.blend.segments import Rotary

Asking = dict[str, Any]


class Requests:
    """Requests of a server with `enable_blending`."""

    def __init__(self, model: str, cache: Path) -> None:
        """Starts a server as a user does."""
        self.server = Server(model, cache, enable_blending=True)
        self.engine = self.server.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.worker = core.model_executor.driver_worker.worker
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.live = get_kv_transfer_group()._worker._blends
        self.counted: Counter[str] = Counter()
        self.number = 0

    def add(self, prompt: list[int], asking: Asking | None = None, salt: str | None = None) -> str:
        """Sends one request."""
        self.number += 1
        extra = {} if asking is None else {"extra_args": {"kv_transfer_params": asking}}
        sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True, **extra)
        salted = {} if salt is None else {"cache_salt": salt}
        self.engine.add_request(str(self.number), {"prompt_token_ids": prompt} | salted, sampling)
        return str(self.number)

    def kv(self, req_id: str, count: int) -> list[torch.Tensor]:
        """The KV of the first tokens of a running request, in vLLM's blocks."""
        (known,) = [one for one in self.scheduler.requests if one.split("-")[0] == req_id]
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(known)
        at = torch.tensor(blocks[: count // BLOCK])
        layers = self.live._blender._nested.layers
        assert self.live._blender._nested.block == BLOCK
        return [layer.kv_cache[at].clone().flatten().view(torch.uint8) for layer in layers]

    def answers(self, *sent: str, look: int = 0) -> dict[str, dict[str, Any]]:
        """Runs the server until all is answered: the answers to `sent`, each with the KV of its
        first `look` tokens, read when its first token came."""
        found: dict[str, dict[str, Any]] = {}
        kv: dict[str, list[torch.Tensor]] = {}
        while self.engine.has_unfinished_requests():
            for made in self.engine.step():
                if look and made.request_id not in kv and not made.finished:
                    kv[made.request_id] = self.kv(made.request_id, look)
                if made.finished:
                    answer = {"tokens": list(made.outputs[0].token_ids), "cached": made.num_cached_tokens}
                    found[made.request_id] = answer | ({"kv": kv[made.request_id]} if look else {})
        return {one: found[one] for one in sent}

    def answer(self, prompt: list[int], asking: Asking | None = None, salt: str | None = None, look: int = 0) -> dict[str, Any]:
        """The answer to one request that runs alone."""
        sent = self.add(prompt, asking, salt)
        return self.answers(sent, look=look)[sent]

    def counts(self) -> dict[str, int]:
        """What was counted since the last call, by name."""
        # A report comes with a step's output; one more step brings the rest.
        self.answer(tokens(5))
        now = Counter({m.name.removeprefix("vllm:forebay_"): int(m.value) for m in self.server.llm.get_metrics() if hasattr(m, "value")})
        grown = {name: count - self.counted[name] for name, count in now.items() if name.startswith("blend_") and count != self.counted[name]}
        self.counted = now
        return grown


def asking(places: list[tuple[int, int]], **more: Any) -> Asking:
    """What a request with a prompt of `prompt_of` has in `kv_transfer_params`."""
    return {"forebay.segments": places, "forebay.blend_anchor": len(ANCHOR)} | {f"forebay.{name}": value for name, value in more.items()}


def evict(of: Requests, prompt: list[int], of_prompt: Asking, kept: int) -> None:
    """Runs a blended request, and takes all but its first blocks out of vLLM's prefix cache."""
    sent = of.add(prompt, of_prompt)
    while not of.engine.step():
        pass
    (known,) = [one for one in of.scheduler.requests if one.split("-")[0] == sent]
    (blocks,) = of.scheduler.kv_cache_manager.get_block_ids(known)
    blocks = list(blocks)
    of.answers(sent)
    of.scheduler.kv_cache_manager.evict_blocks(set(blocks[kept:]))
    of.counts()


def stored(of: Requests) -> dict[str, Any]:
    """A request whose segments are missing, without and with the wish to store them; then one that
    finds them."""
    prompt, places = prompt_of((2, 0, 1), QUESTION)
    seen: dict[str, Any] = {"plain": of.server.whole(prompt)}
    seen["missing"] = of.answer(prompt, asking(places)) | {"counts": of.counts()}
    seen["same prompt"] = of.answer(prompt)
    assert of.server.llm.reset_prefix_cache()
    seen["stores"] = of.answer(prompt, asking(places, store_segments=True)) | {"counts": of.counts()}
    assert of.server.llm.reset_prefix_cache()
    seen["found"] = of.answer(prompt, asking(places)) | {"counts": of.counts()}
    seen["again"] = of.answer(prompt, asking(places)) | {"counts": of.counts()}
    evict(of, prompt, asking(places), 5)
    seen["partly"] = of.answer(prompt, asking(places)) | {"counts": of.counts()}
    seen["other question"] = of.answer(prompt[: places[-1][1]] + QUESTION[::-1], asking(places)) | {"counts": of.counts()}
    return seen


def exactness(of: Requests) -> dict[str, Any]:
    """All tokens computed anew, and a segment in its place, against what vLLM computes: in vLLM's
    blocks, bit for bit."""
    seen: dict[str, Any] = {}
    prompt, places = prompt_of((2, 0, 1), QUESTION)
    plain = of.answer(prompt, salt="plain", look=384)
    every = of.answer(prompt, asking(places, blend_select="first-k", blend_ratio=1.0), look=384)
    seen["all"] = {"equal": every["tokens"] == plain["tokens"], "cached": every["cached"]} | furthest(every["kv"], plain["kv"])
    some = of.answer(prompt, asking(places, blend_select="none"), look=384)
    seen["none"] = {"cached": some["cached"]} | furthest(some["kv"], plain["kv"])
    prompt = ANCHOR + SEGMENTS[3] + QUESTION
    place = [(len(ANCHOR), len(ANCHOR) + len(SEGMENTS[3]))]
    of.answer(prompt, asking(place, store_segments=True, blend_select="none"))
    of.server.llm.reset_prefix_cache()
    plain = of.answer(prompt, salt="plain", look=256)
    here = of.answer(prompt, asking(place, blend_select="none"), look=256)
    seen["in place"] = {"equal": here["tokens"] == plain["tokens"], "cached": here["cached"]} | furthest(here["kv"], plain["kv"])
    return seen


def offline(of: Requests) -> dict[str, Any]:
    """What a request gets, and what `Blend` makes of the same prompt, for each selector."""
    prompt, places = prompt_of((1, 2, 0), QUESTION)
    blend = Blend(of.server.llm, ANCHOR)
    seen: dict[str, Any] = {"plain": of.server.whole(prompt)}
    for select in ("none", "first-k", "query", "deviation"):
        of.server.llm.reset_prefix_cache()
        live = of.answer(prompt, asking(places, blend_select=select, blend_ratio=0.15))
        # Both have the same hashes: without this the second finds what the first has computed.
        of.server.llm.reset_prefix_cache()
        made = of.server.generate(blend.blend(prompt, places, select=select, ratio=0.15).prompt)
        seen[select] = {"live": live, "offline": made}
    seen["afterwards"] = of.answer(prompt)
    of.answer(tokens(5))
    of.live._blender._connector._engine.flush()
    assert of.server.llm.reset_prefix_cache()
    seen["from the cache"] = of.answer(prompt)
    return seen


def together(of: Requests) -> dict[str, Any]:
    """Two blends of the same segments in different orders, and two plain requests, all at once,
    against each alone; the rows that are blended in each step are counted."""
    orders = [prompt_of((1, 2, 0), QUESTION), prompt_of((0, 1, 2), QUESTION)]
    others = [tokens(300), tokens(200)]

    def all_of(salt: str) -> list[tuple[list[int], Asking | None, str]]:
        return [(prompt, asking(places), salt) for prompt, places in orders] + [(prompt, None, salt) for prompt in others]

    alone = [of.answer(*one)["tokens"] for one in all_of("alone")]
    rows: list[int] = []
    blender, advance = of.live._blender, of.live.advance
    one_pass = blender._nested._pass

    def passed(runs: list[tuple[int, int]], seen: Any) -> Any:
        rows[-1] += sum(end - start for start, end in runs)
        return one_pass(runs, seen)

    def advanced() -> None:
        rows.append(0)
        advance()

    of.live.advance, blender._nested._pass = advanced, passed
    sent = [of.add(*one) for one in all_of("together")]
    beside = of.answers(*sent)
    del of.live.advance, blender._nested._pass
    return {
        "alone": alone,
        "together": [beside[one]["tokens"] for one in sent],
        "cached": [beside[one]["cached"] for one in sent],
        "rows": rows,
        "counts": of.counts(),
    }


def interrupted(of: Requests) -> dict[str, Any]:
    """Two requests that are aborted before the first one's blend or in it, while the second one's
    waits behind it; and a preemption."""
    prompt, places = prompt_of((1, 2, 0), QUESTION)
    pool, seen = of.scheduler.kv_cache_manager.block_pool, {}
    alone = of.answer(prompt, asking(places), "not interrupted")["tokens"]
    of.counts()
    assert of.server.llm.reset_prefix_cache()
    free = pool.get_num_free_blocks()
    for steps in range(4):
        sent = [of.add(prompt, asking(places), f"aborted {steps} {number}") for number in range(2)]
        for _ in range(steps):
            of.engine.step()
        of.engine.abort_request(sent)
        while of.engine.has_unfinished_requests():
            of.engine.step()
    # What vLLM holds for a job is freed when the worker reports it, in one of the next steps.
    after = of.answer(prompt, asking(places), "after")["tokens"]
    seen["aborted"] = {"counts": of.counts(), "right": after == alone, "waiting": len(of.live._waiting), "known": len(of.scheduler.requests)}
    assert of.server.llm.reset_prefix_cache()
    seen["aborted"]["leaked"] = free - pool.get_num_free_blocks()
    # vLLM takes the running requests' blocks away, and empties its prefix cache.
    sent = of.add(prompt, asking(places), "preempted")
    made: list[Any] = []
    while not (made and made[0].outputs and len(made[0].outputs[0].token_ids) > 3):
        made = of.engine.step()
    assert of.engine.reset_prefix_cache(reset_running_requests=True)
    seen["preempted"] = {"right": of.answers(sent)[sent]["tokens"] == alone, "counts": of.counts()}
    return seen


def failures(of: Requests, cache: Path) -> dict[str, Any]:
    """What cannot be blended is computed, and counted by its cause."""
    seen: dict[str, Any] = {}
    prompt, places = prompt_of((0, 2), QUESTION)
    plain = of.server.whole(prompt)

    def tried(name: str, of_prompt: Asking, short: list[int] | None = None) -> None:
        made = of.answer(short or prompt, of_prompt, f"tenant {name}")
        seen[name] = {"right": made["tokens"] == (of.server.whole(short) if short else plain), "cached": made["cached"], "counts": of.counts()}

    wrong: dict[str, Asking] = {
        "no list": {"forebay.segments": 7},
        "fractions": {"forebay.segments": [[0.5, 20]]},
        "order": {"forebay.segments": [[50, 80], [10, 20]]},
        "beyond": {"forebay.segments": [[10, 10_000]]},
        "selector": asking(places, blend_select="best"),
        "ratio": asking(places, blend_ratio="much"),
        "anchor": asking(places) | {"forebay.blend_anchor": 500},
    }
    for name, of_prompt in wrong.items():
        tried(name, of_prompt)
    tried("not loaded", asking(places, skip_load=True))
    tried("short", {"forebay.segments": [[2, 9]], "forebay.blend_select": "none"}, prompt[:20])
    tried("right", asking(places, blend_select="none"))
    segments = of.live._blender._segments
    rotary = segments._rotary
    half = rotary[0].table.shape[1] // 2
    turned = torch.cat([rotary[0].table[:, :half], -rotary[0].table[:, half:]], 1)
    segments._rotary = [Rotary(turned, one.is_neox, one.layers) for one in rotary]
    tried("gate", asking(places, blend_select="none"))
    segments._rotary = rotary
    steps, of.live._blender.blending = of.live._blender.blending, None
    tried("error", asking(places, blend_select="none"))
    of.live._blender.blending = steps
    segments._engine.flush()
    (space,) = [folder for folder in cache.rglob("*") if folder.is_dir() and folder.name == str(segments._engine.geometry.namespace)]
    flip_bits(space)
    tried("flipped", asking(places, blend_select="none"))
    # One is stored and damaged, then the other is stored.
    segments._engine.clear()
    of.answer(prompt, asking(places[:1], store_segments=True), "first")
    segments._engine.flush()
    flip_bits(space)
    of.answer(prompt, asking(places[1:], store_segments=True), "second")
    of.counts()
    tried("one damaged", asking(places, blend_select="none"))
    return seen


def reset(of: Requests) -> dict[str, Any]:
    """The connector's cache is reset in the middle of a blend; and what a script gets before the
    next step."""
    prompt, places = prompt_of((1, 2, 0), QUESTION)
    plain = of.server.whole(prompt)
    blend = Blend(of.server.llm, ANCHOR)
    of.live._blender._segments._engine.clear()
    of.counts()
    sent = of.add(prompt, asking(places, store_segments=True), "reset")
    for _ in range(20):
        of.engine.step()
        if of.live._under_way is not None:
            break
    under_way = of.live._under_way is not None
    of.engine.reset_prefix_cache(reset_connector=True)
    try:
        said = f"stored {blend.store(tokens(50))}"
    except BlendError as error:
        said = str(error)
    answers = [of.answers(sent)[sent], of.answer(prompt, asking(places, store_segments=True), "later")]
    return {"under way": under_way, "said": said, "right": [one["tokens"] == plain for one in answers], "counts": of.counts()}


def main() -> None:
    """Runs all of it."""
    model, cache, result = sys.argv[1:]
    of = Requests(model, Path(cache))
    seen: dict[str, Any] = {"step": STEP, "stored": stored(of)}
    seen["exactness"] = exactness(of)
    seen["offline"] = offline(of)
    seen["together"] = together(of)
    seen["interrupted"] = interrupted(of)
    seen["failures"] = failures(of, Path(cache))
    # The last: it does not come back.
    seen["reset"] = reset(of)
    Path(result).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
