"""One process with one vLLM of one or several tensor-parallel workers that blends.

Usage: blending_parallel.py MODEL CACHE RESULT WORKERS. Writes what it saw as JSON; test_blend.py says what it must be.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from blending import ANCHOR, LAYERS, QUESTION, SEGMENTS, SHARES, Server, prompt_of, tokens
from test_damage import flip_bits
from vllm import SamplingParams

from forebay.vllm.blend import Blend

SELECTORS = ("none", "first-k", "query", "deviation")


class Requests:
    """Requests of a server with `enable_blending`."""

    def __init__(self, server: Server) -> None:
        """Nothing is sent or counted yet."""
        self.server = server
        self.counted: Counter[str] = Counter()

    def answer(self, prompt: list[int], places: list[tuple[int, int]], **more: Any) -> dict[str, Any]:
        """The answer to one request that blends, with what was counted for it."""
        assert self.server.llm.reset_prefix_cache()
        asked = {"forebay.segments": places, "forebay.blend_anchor": len(ANCHOR)} | {f"forebay.{name}": value for name, value in more.items()}
        sampling = SamplingParams(
            temperature=0, max_tokens=12, detokenize=False, ignore_eos=True, extra_args={"kv_transfer_params": asked}
        )
        (made,) = self.server.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        # A report comes with a step's output; one more step brings the rest.
        self.server.generate({"prompt_token_ids": tokens(5)})
        metrics = self.server.llm.get_metrics()
        now = Counter({m.name.removeprefix("vllm:forebay_"): int(m.value) for m in metrics if hasattr(m, "value")})
        grown = {name: count - self.counted[name] for name, count in now.items() if name.startswith("blend_") and count != self.counted[name]}
        self.counted = now
        return {"tokens": list(made.outputs[0].token_ids), "cached": made.num_cached_tokens, "counts": grown}


def segments_of(worker: Any) -> Any:
    """The segments of a worker; runs in its process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker._blends._blender._segments


def flushed(worker: Any) -> str:
    """Makes durable what a worker has stored; the namespace of its segments."""
    engine = segments_of(worker)._engine
    engine.flush()
    return str(engine.geometry.namespace)


def clear_last(worker: Any) -> bool:
    """Removes all segments of the last worker alone."""
    from vllm.distributed import get_tp_group

    if mine := get_tp_group().is_last_rank:
        segments_of(worker)._engine.clear()
    return bool(mine)


def main() -> None:
    """Runs all of it."""
    model, cache, result, workers = sys.argv[1:]
    server = Server(model, Path(cache), workers=int(workers), enable_blending=True)
    requests = Requests(server)
    prompt, places = prompt_of((2, 0, 1), QUESTION)
    seen: dict[str, Any] = {"plain": server.whole(prompt)}
    seen["missing"] = requests.answer(prompt, places)
    seen["stores"] = requests.answer(prompt, places, store_segments=True)
    for select in SELECTORS:
        seen[select] = requests.answer(prompt, places, blend_select=select)
        seen[f"all {select}"] = requests.answer(prompt, places, blend_select=select, blend_ratio=1.0) if select != "none" else None
    # The calls of a script.
    blend = Blend(server.llm, ANCHOR)
    seen["stored"] = [[blend.has(segment), blend.store(segment), blend.has(segment)] for segment in SEGMENTS]
    made = blend.blend(prompt, places, select="query", ratio=0.15)
    again = blend.blend(prompt, places, select="query", ratio=0.15)
    assert server.llm.reset_prefix_cache()
    seen["script"] = server.generate(made.prompt) | {"states": [one.state for one in made.segments], "recomputed": made.recomputed, "again": again.was_there}
    layered = blend.blend(prompt, places, select="deviation", ratio=SHARES, check_layer=LAYERS)
    seen["layers"] = server.generate(layered.prompt) | {"recomputed": layered.recomputed}
    # A threshold that about half of the tokens reach.
    bounded = blend.blend(prompt, places, select="deviation", ratio=1.0, threshold=1.2)
    seen["bounded"] = server.generate(bounded.prompt) | {"recomputed": bounded.recomputed}
    # A segment that one worker has lost is used by none.
    spaces = set(server.llm.collective_rpc(flushed))
    shards = sorted(folder for space in spaces for folder in (Path(cache) / space).glob("pp*"))
    seen["shards"] = [folder.name for folder in shards]
    flip_bits(shards[-1])
    seen["flipped"] = requests.answer(prompt, places, blend_select="none")
    requests.answer(prompt, places, store_segments=True)
    seen["whole again"] = requests.answer(prompt, places, blend_select="none")
    seen["cleared"] = server.llm.collective_rpc(clear_last)
    seen["lost"] = requests.answer(prompt, places, blend_select="none")
    Path(result).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
