"""Requests that are blended in a running vLLM: exact where they must be, computed where a blend
fails, and in nobody else's way."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, SEED, settings
from test_blend import COVERED, REUSED, configuration, run
from test_server import Starting, server

#: vLLM's worker_extension_cls.
EXTENSION = "forebay.vllm.blend.worker.BlendWorker"

#: What `query` computes anew of three segments.
SHARE = round(0.15 * REUSED)


@pytest.fixture(scope="module")
def seen(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What blending_requests.py saw."""
    return run("blending_requests.py", tmp_path_factory.mktemp("requests"), model)


@pytest.mark.ci
def test_a_request_whose_segments_are_missing_is_one_that_did_not_ask(seen: dict[str, Any]) -> None:
    stored = seen["stored"]
    assert (stored["missing"]["tokens"], stored["missing"]["cached"]) == (stored["plain"], 0)
    assert stored["missing"]["counts"] == {"blend_computed_missing": 1}
    assert (stored["same prompt"]["tokens"], stored["same prompt"]["cached"]) == (stored["plain"], 448), "vLLM's own blocks of it are exact"


@pytest.mark.ci
def test_missing_segments_are_stored_where_that_is_asked_for(seen: dict[str, Any]) -> None:
    stored = seen["stored"]
    counts = {"blend_requests": 1, "blend_segments_reused": 3, "blend_tokens_reused": REUSED - SHARE, "blend_tokens_recomputed": SHARE}
    assert stored["stores"]["counts"] == counts | {"blend_segments_stored": 3}
    assert stored["found"]["counts"] == counts
    assert stored["found"]["tokens"] == stored["stores"]["tokens"] != stored["plain"]
    assert [stored[name]["cached"] for name in ("stores", "found")] == [COVERED] * 2


@pytest.mark.ci
def test_the_same_request_finds_the_blend_in_vllms_prefix_cache_and_another_question_does_not(seen: dict[str, Any]) -> None:
    stored = seen["stored"]
    assert (stored["again"]["tokens"], stored["again"]["cached"]) == (stored["found"]["tokens"], 448)
    assert stored["again"]["counts"] == {}
    assert stored["other question"]["counts"]["blend_requests"] == 1


@pytest.mark.ci
def test_what_the_prefix_cache_has_lost_of_a_blend_is_blended_again(seen: dict[str, Any]) -> None:
    partly = seen["stored"]["partly"]
    assert (partly["tokens"], partly["cached"]) == (seen["stored"]["found"]["tokens"], COVERED)
    assert partly["counts"]["blend_requests"] == 1


@pytest.mark.ci
def test_all_tokens_computed_anew_are_vllms_own_prefill_bit_for_bit(seen: dict[str, Any]) -> None:
    every = seen["exactness"]["all"]
    assert (every["cached"], every["largest"] > 1) == (COVERED, True)
    assert every["equal"], every
    assert not seen["exactness"]["none"]["equal"], "otherwise that shows nothing"


@pytest.mark.ci
def test_a_segment_in_its_place_is_a_plain_prefix_bit_for_bit(seen: dict[str, Any]) -> None:
    here = seen["exactness"]["in place"]
    assert (here["cached"], here["largest"] > 1) == (256, True)
    assert here["equal"], here


@pytest.mark.ci
@pytest.mark.parametrize("select", ["none", "first-k", "query", "deviation"])
def test_a_request_gets_what_the_same_blend_offline_gets(seen: dict[str, Any], select: str) -> None:
    of = seen["offline"][select]
    assert of["live"] == of["offline"]
    assert of["live"]["cached"] == COVERED


@pytest.mark.ci
def test_an_exact_request_never_gets_blended_kv(seen: dict[str, Any]) -> None:
    offline = seen["offline"]
    assert all(offline[select]["live"]["tokens"] != offline["plain"] for select in ("none", "first-k", "query", "deviation")), "blends must show"
    assert (offline["afterwards"]["tokens"], offline["afterwards"]["cached"]) == (offline["plain"], 0)
    assert (offline["from the cache"]["tokens"], offline["from the cache"]["cached"]) == (offline["plain"], 384)


@pytest.mark.ci
def test_blends_in_other_orders_and_other_requests_at_once_are_what_each_is_alone(seen: dict[str, Any]) -> None:
    together = seen["together"]
    assert together["together"] == together["alone"]
    assert together["cached"] == [COVERED, COVERED, 0, 0]


@pytest.mark.ci
def test_a_step_computes_no_more_rows_of_blends_than_vllms_own_may_have(seen: dict[str, Any]) -> None:
    rows = seen["together"]["rows"]
    assert max(rows) <= seen["step"]
    assert sum(1 for one in rows if one) > 1, "more than one step's worth was asked for"


@pytest.mark.ci
def test_aborted_blends_give_their_blocks_back(seen: dict[str, Any]) -> None:
    aborted = seen["interrupted"]["aborted"]
    assert aborted["right"]
    assert aborted["counts"]["blend_aborted"] > 0
    assert (aborted["waiting"], aborted["known"], aborted["leaked"]) == (0, 0, 0)


@pytest.mark.ci
def test_a_preempted_request_is_blended_again(seen: dict[str, Any]) -> None:
    preempted = seen["interrupted"]["preempted"]
    assert preempted["right"]
    assert preempted["counts"]["blend_requests"] == 2


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "cause"),
    [(name, "invalid") for name in ("no list", "fractions", "order", "beyond", "selector", "ratio", "anchor")]
    + [("not loaded", "skipped"), ("short", "short"), ("gate", "gate"), ("error", "error"), ("flipped", "failed")],
)
def test_what_cannot_be_blended_is_computed_and_counted(seen: dict[str, Any], name: str, cause: str) -> None:
    failure = seen["failures"][name]
    assert failure["right"], "the answer must be vLLM's own"
    assert (failure["cached"], failure["counts"][f"blend_computed_{cause}"]) == (0, 1)
    assert "blend_requests" not in failure["counts"]


@pytest.mark.ci
def test_the_same_request_without_that_trouble_is_blended(seen: dict[str, Any]) -> None:
    right = seen["failures"]["right"]
    assert (right["right"], right["counts"]["blend_requests"]) == (False, 1)


@pytest.mark.ci
def test_a_damaged_segment_among_others_is_a_hole(seen: dict[str, Any]) -> None:
    damaged = seen["failures"]["one damaged"]
    assert damaged["counts"]["blend_requests"] == 1
    assert (damaged["counts"]["blend_segments_failed"], damaged["counts"]["blend_segments_reused"]) == (1, 1)


@pytest.mark.ci
def test_a_reset_of_the_connectors_cache_ends_all_blends(seen: dict[str, Any]) -> None:
    reset = seen["reset"]
    assert reset["under way"]
    assert "the connector's cache was reset" in reset["said"]
    assert reset["right"] == [True, True]
    # The second is not even taken for a blend.
    assert reset["counts"] == {"blend_computed_reset": 1}


def test_clients_of_the_openai_server_get_blends(model: str, tmp_path: Path) -> None:
    source = random.Random(SEED)
    begin, question, *documents = ([source.randrange(4, 512) for _ in range(count)] for count in (40, 70, 200, 150))
    options = ("--max-model-len", "2048", "--max-num-batched-tokens", "128", "--worker-extension-cls", EXTENSION)

    def asked(*order: int) -> tuple[list[int], dict[str, Any]]:
        prompt, places = list(begin), []
        for number in order:
            places.append([len(prompt), len(prompt) + len(documents[number])])
            prompt += documents[number]
        return prompt + question, {"forebay.segments": places, "forebay.store_segments": True}

    with server(tmp_path, model, settings(tmp_path / "cache", enable_blending=True), options) as of:
        plain = {order: of.complete(asked(*order)[0]) for order in ((0, 1), (1, 0))}
        with ThreadPoolExecutor(4) as clients:
            sent = [clients.submit(of.complete, prompt, kv_transfer_params=params) for prompt, params in (asked(0, 1), asked(1, 0))]
            others = [clients.submit(of.complete, asked(*order)[0]) for order in plain]
            blended, exact = [one.result() for one in sent], [one.result() for one in others]
        assert exact == list(plain.values())
        assert blended != exact, "otherwise nothing shows"
        every = {"forebay.blend_select": "first-k", "forebay.blend_ratio": 1.0}
        prompt, params = asked(1, 0)
        assert of.complete(prompt, kv_transfer_params=params | every) == plain[1, 0]
        assert of.metric("vllm:forebay_blend_requests") == 3
        assert of.metric("vllm:forebay_blend_segments_stored") == 2
        assert of.metric("vllm:forebay_blend_segments_reused") == 6


def test_segments_of_a_text_are_found_by_their_separator(model: str, tmp_path: Path) -> None:
    source, separator = random.Random(SEED), "</s>"
    begin, question, *documents = ("".join(source.choices("abcdefgh ", k=count)) for count in (40, 70, 200, 150))
    cache = settings(tmp_path / "cache", enable_blending=True, blend_special_str=separator)
    options = ("--max-model-len", "2048", "--worker-extension-cls", EXTENSION)
    asks = {"forebay.blend": True, "forebay.store_segments": True}

    def texts(order: tuple[int, ...]) -> str:
        return separator.join([begin, *(documents[number] for number in order), question])

    with server(tmp_path, model, cache, options) as of:
        plain = of.complete(texts((1, 0)))
        of.complete(texts((0, 1)), kv_transfer_params=asks)
        assert of.metric("vllm:forebay_blend_segments_stored") == 2
        found = of.complete(texts((1, 0)), kv_transfer_params=asks)
        assert found != plain, "otherwise nothing shows"
        # A byte is a token, and so is the separator.
        named = {"forebay.segments": [[41, 191], [192, 392]]}
        # Computed from the same segments once more, not taken from vLLM's cache.
        assert of.complete(texts((1, 0)), kv_transfer_params=named, cache_salt="tenant") == found
        assert of.complete(texts((1, 0))) == plain
        assert of.metric("vllm:forebay_blend_requests") == 3
        assert (of.metric("vllm:forebay_blend_segments_stored"), of.metric("vllm:forebay_blend_segments_reused")) == (2, 6)
        of.complete(begin + question, kv_transfer_params=asks)
        assert of.metric("vllm:forebay_blend_computed_separator") == 1


def test_a_server_whose_workers_cannot_blend_does_not_start(model: str, tmp_path: Path) -> None:
    starting = Starting(tmp_path, model, settings(tmp_path / "cache", enable_blending=True), ("--max-model-len", "2048"))
    assert starting.process.wait(PATIENCE_S) != 0
    assert f"start with --worker-extension-cls {EXTENSION}" in starting.log.read_text()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("change", "layerwise", "name"),
    [
        ({"parallel_config__worker_extension_cls": ""}, False, "--worker-extension-cls forebay.vllm.blend.worker.BlendWorker"),
        ({}, True, "use_layerwise"),
        ({"parallel_config__pipeline_parallel_size": 2}, False, "pipeline parallelism of 2"),
    ],
)
def test_servers_that_cannot_blend_are_refused_by_name(change: dict[str, Any], layerwise: bool, name: str) -> None:
    from forebay.vllm.blend import refuse
    from forebay.vllm.geometry import Unsupported

    of = {"parallel_config__worker_extension_cls": refuse.EXTENSION}
    refuse.live(configuration(**of), layerwise=False)
    with pytest.raises(Unsupported, match=re.escape(name)):
        refuse.live(configuration(**of | change), layerwise)
