"""What a request that asks for a blend becomes in vLLM's scheduler: its salt and block hashes, and what is left when the blend fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from forebay.vllm.blend.planning import Planner

from .server import BLOCK_TOKENS

PROMPT = [4 + i * 11 % 500 for i in range(200)]
PLACES = [[20, 90], [90, 150]]


def planner() -> Planner:
    """Of a server with prefix caching and no settings of its own."""
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True))
    settings = SimpleNamespace(resolved={"blend_check_layers": [], "blend_recompute_ratios": []})
    return Planner(config, BLOCK_TOKENS, settings)  # type: ignore[arg-type]


def request(tokens: list[int] = PROMPT, salt: str | None = None, hashed: bool = True, **asking: Any) -> Request:
    """A request that asks for a blend."""
    init_none_hash(sha256)
    params = {"forebay.segments": PLACES} | {f"forebay.{name}": value for name, value in asking.items()}
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params})
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256) if hashed else None
    return Request("a", list(tokens), sampling, None, cache_salt=salt, block_hasher=hasher)


def planned(**asking: Any) -> list[bytes]:
    """The block hashes of a request that is blended."""
    asked = request(**asking)
    assert planner().takes(asked)
    return list(asked.block_hashes)


def test_every_block_has_another_hash_than_the_same_tokens_without_a_blend() -> None:
    plain = request().block_hashes
    assert len(plain) == len(PROMPT) // BLOCK_TOKENS
    assert not set(plain) & set(planned())


def test_what_a_blend_depends_on_is_part_of_its_hashes() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"salt": "tenant"},
        {"blend_ratio": 0.3},
        {"blend_select": "none"},
        {"blend_anchor": 8},
        {"segments": PLACES[:1]},
        {"tokens": PROMPT[:-1] + [7]},
    ]
    firsts = [planned(**kind)[0] for kind in kinds]
    assert len(set(firsts)) == len(kinds)
    assert planned() == planned(), "the same blend is found again"
    # Without `query` the question decides nothing, and its blocks alone differ.
    assert planned(blend_select="none")[0] == planned(blend_select="none", tokens=PROMPT[:-1] + [7])[0]


def test_a_request_whose_blend_failed_is_the_one_that_came() -> None:
    for salt in (None, "tenant"):
        asked, plans = request(salt=salt), planner()
        before = list(asked.block_hashes)
        assert plans.takes(asked)
        assert plans.matched("a", 0) == (160, True)
        plans.allocated("a", list(range(30, 40)), 160)
        (job,) = plans.jobs()
        assert (job.first, job.blocks, job.covered) == (0, list(range(30, 40)), 160)
        report = plans.reported({"a", "other"}, {"a"})
        assert (report.over, report.failed, report.computed) == ({"other"}, set(), [asked])
        assert (asked.cache_salt, list(asked.block_hashes)) == (salt, before)
        assert not plans.has("a")


def test_blocks_that_vllm_has_are_not_written() -> None:
    asked, plans = request(), planner()
    assert plans.takes(asked)
    assert plans.matched("a", 2 * BLOCK_TOKENS) == (160 - 2 * BLOCK_TOKENS, True)
    plans.allocated("a", list(range(30, 43)), 160 - 2 * BLOCK_TOKENS)
    (job,) = plans.jobs()
    assert (job.first, job.blocks) == (2, list(range(32, 40)))
    assert plans.matched("a", 160) == (0, False)


def test_a_report_of_an_aborted_blend_goes_no_further() -> None:
    asked, plans = request(), planner()
    assert plans.takes(asked)
    plans.matched("a", 0)
    plans.allocated("a", list(range(10)), 160)
    plans.finished("a")
    report = plans.reported({"a"}, {"a"})
    assert (report.over, report.failed, report.computed) == (set(), set(), [])


def test_a_request_whose_hashes_do_not_follow_its_salt_is_not_blended() -> None:
    plans, asked = planner(), request(hashed=False)
    assert not plans.takes(asked)
    assert asked.cache_salt is None
    assert plans.counts() == {"blend_computed_salt": 1}
