"""One process with one vLLM whose engine runs in another: prompts are blended while other requests are under way.

Usage: blending_live.py MODEL CACHE RESULT. Asynchronous scheduling, prefix caching, prompts in pieces: what the other requests generate is written, once
without and once with blends between their steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from blending import ANCHOR, QUESTION, SEGMENTS, Server, prompt_of, tokens
from vllm import SamplingParams

from forebay.vllm.blend import Blend


def others(server: Server, prompts: list[list[int]], salt: str, between: Any) -> tuple[list[list[int]], int]:
    """Tokens of some long requests; `between` is called after their first steps, and how many of them were then under way."""
    engine, done = server.llm.llm_engine, {}
    sampling = SamplingParams(temperature=0, max_tokens=60, detokenize=False, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{salt}{number}", {"prompt_token_ids": prompt, "cache_salt": salt}, sampling)
    # Some tokens have come, many are to come.
    while not any(len(made.outputs[0].token_ids) > 3 for made in engine.step()):
        pass
    under_way = engine.get_num_unfinished_requests()
    between()
    while engine.has_unfinished_requests():
        done.update({made.request_id: list(made.outputs[0].token_ids) for made in engine.step() if made.finished})
    return [done[f"{salt}{number}"] for number in range(len(prompts))], under_way


def main() -> None:
    """Runs it."""
    model, cache, result = sys.argv[1:]
    server = Server(model, Path(cache))
    blend = Blend(server.llm, ANCHOR)
    prompts = [tokens(300 + 50 * number) for number in range(3)]
    prompt, places = prompt_of((1, 2, 0), QUESTION)
    alone, _ = others(server, prompts, "alone", lambda: None)
    made: list[Any] = []

    def between() -> None:
        for segment in SEGMENTS[:3]:
            blend.store(segment)
        made.extend(blend.blend(prompt, places, select=select, ratio=ratio) for select, ratio in (("query", 0.15), ("first-k", 1.0)))

    beside, under_way = others(server, prompts, "beside", between)
    Path(result).write_text(
        json.dumps(
            {
                "alone": alone,
                "beside": beside,
                "under way": under_way,
                "states": [[one.state for one in blended.segments] for blended in made],
                "blended": [server.generate(blended.prompt) for blended in made],
                "whole": server.whole(prompt),
            }
        )
    )


if __name__ == "__main__":
    main()
