"""What a request that asks for a blend becomes in vLLM's scheduler: its salt and block hashes, and what is left when the blend fails."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from forebay.vllm.blend import client, separator
from forebay.vllm.blend.nested import Nested
from forebay.vllm.blend.planning import Planner
from forebay.vllm.scheduling import SchedulerHalf

from .server import BLOCK_TOKENS

PROMPT = [4 + i * 11 % 500 for i in range(200)]
PLACES = [[20, 90], [90, 150]]


def planner(**given: Any) -> Planner:
    """Of a server with prefix caching; `given` are its settings, and `model` its model's configuration."""
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True), model_config=given.pop("model", None))
    settings = SimpleNamespace(resolved={"blend_check_layers": [], "blend_recompute_ratios": [], "blend_thresholds": [], "blend_special_str": None} | given)
    return Planner(config, BLOCK_TOKENS, settings)  # type: ignore[arg-type]


def request(tokens: list[int] = PROMPT, salt: str | None = None, hashed: bool = True, places: Any = PLACES, **asking: Any) -> Request:
    """A request that asks for a blend."""
    init_none_hash(sha256)
    params = ({} if places is None else {"forebay.segments": places}) | {f"forebay.{name}": value for name, value in asking.items()}
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


def test_a_prompt_has_a_bounded_number_of_segments() -> None:
    plans = planner()
    places = [[n, n + 1] for n in range(150)]
    assert plans.takes(request(places=places))
    many = [4] * 400
    assert not plans.takes(request(many, places=[[n, n + 1] for n in range(257)]))
    assert plans.counts() == {"blend_computed_invalid": 1}


def test_an_offline_blend_of_another_question_is_another_one() -> None:
    salts: list[str] = []

    def rpc(_: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        salts.append(args[-1])
        return [{"result": {"states": ["reused"], "covered": 0, "reused": 0, "recomputed": 0, "was_there": False}}]

    offline: Any = object.__new__(client.Blend)
    offline._llm, offline._anchor = SimpleNamespace(collective_rpc=rpc), []
    for select in ("query", "first-k"):
        for question in ([7, 8], [7, 9]):
            offline.blend([1, 2, 3, 4, *question], [(0, 4)], select=select)
    assert salts[0] != salts[1] and salts[2] == salts[3]


def test_each_offline_blend_keeps_its_own_anchor() -> None:
    called: list[Any] = []

    def rpc(method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        called.append((method.removeprefix("forebay_blend_"), *args[:2]))
        return [{"result": 0}]

    llm = SimpleNamespace(collective_rpc=rpc)
    first, second = client.Blend(llm, [1]), client.Blend(llm, [2])
    first.store([7])
    second.store([8])
    first.has([7])
    assert called == [("open",), ("open",), ("store", [1], [7]), ("store", [2], [8]), ("has", [1], [7])]


def test_clients_do_not_fill_the_log(log: pytest.LogCaptureFixture) -> None:
    plans = planner()
    for wrong in ({"blend_ratio": "9x" * 10_000}, {"blend_select": "best" * 10_000}, {"blend_anchor": ["a"] * 10_000}):
        for one in (plans, planner()):
            assert not one.takes(request(**wrong))
    # One of the planner that met all three, and one of each of the others.
    told = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert len(told) == 1 + 3
    assert all(len(one) < 400 for one in told)


def test_a_blend_without_memory_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    nested: Any = object.__new__(Nested)
    nested.device, nested.names, nested.scratch = torch.device("cpu"), ["a", "b"], []
    nested.layers = [SimpleNamespace(kv_cache=torch.zeros(4, 2, 3))] * 2
    zeros, made = torch.zeros, []

    def scarce(*shape: Any, **more: Any) -> torch.Tensor:
        made.append(shape)
        if len(made) == 2:
            raise torch.OutOfMemoryError("none left")
        return zeros(*shape, **more)

    monkeypatch.setattr(torch, "zeros", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        nested.begin([1, 2], 8)
    assert nested.scratch == []
    nested.begin([1, 2], 4)
    assert len(nested.scratch) == 2


def test_what_a_blend_depends_on_is_part_of_its_hashes() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"salt": "tenant"},
        {"blend_ratio": 0.3},
        {"blend_select": "none"},
        {"blend_select": "deviation"},
        {"blend_select": "deviation", "blend_threshold": 0.1},
        {"blend_anchor": 8},
        {"places": PLACES[:1]},
        {"tokens": PROMPT[:-1] + [7]},
    ]
    firsts = [planned(**kind)[0] for kind in kinds]
    assert len(set(firsts)) == len(kinds)
    assert planned() == planned(), "the same blend is found again"
    # Without `query` the question decides nothing, and its blocks alone differ.
    assert planned(blend_select="none")[0] == planned(blend_select="none", tokens=PROMPT[:-1] + [7])[0]


def test_several_check_layers_have_a_share_each() -> None:
    given = {"blend_check_layers": [1, 8, 16], "blend_recompute_ratios": [0.2, 0.15, 0.1]}

    def job(**asking: Any) -> tuple[str, list[float], list[int]]:
        plans = planner(**given)
        assert plans.takes(request(**asking))
        plans.matched("a", 0)
        plans.allocated("a", list(range(10)), 160)
        (made,) = plans.jobs()
        return made.asked.select, made.asked.ratios, made.asked.check_layers

    assert job() == ("deviation", [0.2, 0.15, 0.1], [1, 8, 16])
    assert job(blend_ratio=[0.5, 0.5, 0.25])[1] == [0.5, 0.5, 0.25]
    hashes = []
    for shares in ([0.2, 0.15, 0.1], [0.2, 0.15, 0.05]):
        asked = request(blend_ratio=shares)
        assert planner(**given).takes(asked)
        hashes.append(asked.block_hashes[0])
    assert hashes[0] != hashes[1]
    # Others have no check layers: the first share is theirs.
    assert job(blend_select="query")[:2] == ("query", [0.2])
    assert job(blend_select="first-k", blend_ratio=0.3)[:2] == ("first-k", [0.3])
    for wrong in (0.3, [0.3, 0.2], [0.1, 0.2, 0.3], "0.2", [0.2, None, 0.1]):
        plans = planner(**given)
        assert not plans.takes(request(blend_ratio=wrong)), wrong
        assert plans.counts() == {"blend_computed_invalid": 1}


def test_thresholds_are_those_of_what_is_compared() -> None:
    def thresholds(given: dict[str, Any], **asking: Any) -> list[float]:
        plans = planner(blend_thresholds=[0.1, 0.2], **given)
        assert plans.takes(request(**asking))
        plans.matched("a", 0)
        plans.allocated("a", list(range(10)), 160)
        (made,) = plans.jobs()
        return made.asked.thresholds

    given = {"blend_check_layers": [1, 8], "blend_recompute_ratios": [0.2, 0.1]}
    assert thresholds(given) == [0.1, 0.2]
    assert thresholds(given, blend_threshold=[0, 3]) == [0.0, 3.0]
    assert thresholds(given, blend_select="query") == [], "nothing is compared"
    for wrong in (0.1, [0.1], [0.1, -0.1], [0.1, float("nan")], "high"):
        plans = planner(**given)
        assert not plans.takes(request(blend_threshold=wrong)), wrong
        assert plans.counts() == {"blend_computed_invalid": 1}
    assert not planner().takes(request(blend_select="query", blend_threshold=0.1)), "it would have no effect"


@pytest.mark.parametrize(
    ("layers", "ratios", "thresholds", "words"),
    [
        ([], [0.2, 0.1], [], "one share for each layer"),
        ([1, 2], [], [], "one share for each layer"),
        ([1, 2], [0.2, 0.1, 0.05], [], "one share for each layer"),
        ([2, 1], [0.2, 0.1], [], "ascending"),
        ([1, 1], [0.2, 0.1], [], "ascending"),
        ([1, 2], [0.1, 0.2], [], "no share may be larger"),
        ([], [1.5], [], "0 to 1"),
        ([], [], [-0.1], "0 or more"),
        ([], [], [0.1, 0.2], "one threshold for each layer"),
        ([1, 2], [0.2, 0.1], [0.1], "one threshold for each layer"),
    ],
)
def test_settings_that_make_no_sense_together_are_refused(
    layers: list[int], ratios: list[float], thresholds: list[float], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as said:
        planner(blend_check_layers=layers, blend_recompute_ratios=ratios, blend_thresholds=thresholds)
    named = f"blend_recompute_ratios is {ratios}, blend_check_layers {layers}, blend_thresholds {thresholds}: "
    assert str(said.value).startswith(named)


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
        assert (report.over, report.computed) == ({"other"}, [asked])
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
    assert (report.over, report.computed) == (set(), [])


def test_steps_that_also_compute_blends_do_not_measure_computing() -> None:
    asked, plans, counted = request(), planner(), list[int]()
    half: Any = object.__new__(SchedulerHalf)
    half._planner, half._announcer, half._unverified = plans, None, None
    half._requests, half._held, half._failed, half._resting, half._step = {}, set(), set(), False, 0
    half._side = SimpleNamespace(
        build_connector_meta=lambda *_, num_scheduled, **__: counted.append(num_scheduled),
        update_connector_output=lambda *_: [],
    )

    def step() -> None:
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        half.build_connector_meta(
            SimpleNamespace(
                num_scheduled_tokens={},
                scheduled_cached_reqs=cached,
                scheduled_new_reqs=[],
                finished_req_ids=set(),
                preempted_req_ids=set(),
                total_num_scheduled_tokens=64,
            )
        )

    assert plans.takes(asked)
    step()
    plans.matched("a", 0)
    plans.allocated("a", list(range(10)), 160)
    step()
    # It goes on in a later step.
    step()
    half.update_connector_output(
        SimpleNamespace(kv_connector_worker_meta=None, finished_recving={"a"}, failed_recving=set(), finished_sending=set())
    )
    step()
    assert counted == [64, 0, 0, 64]


def test_a_request_whose_hashes_do_not_follow_its_salt_is_not_blended() -> None:
    plans, asked = planner(), request(hashed=False)
    assert not plans.takes(asked)
    assert asked.cache_salt is None
    assert plans.counts() == {"blend_computed_salt": 1}


@pytest.mark.parametrize(
    ("tokens", "by", "found"),
    [
        ([1, 2, 9, 3, 4, 9, 5, 9, 6, 7], [9], [(3, 5), (6, 7)]),
        ([1, 8, 9, 3, 8, 9, 5], [8, 9], [(3, 4)]),
        # At both ends: no beginning, no question.
        ([9, 1, 2, 9], [9], [(1, 3)]),
        # Side by side, and one that begins within another.
        ([1, 9, 9, 2, 9, 9, 9, 3], [9], [(3, 4)]),
        ([1, 9, 9, 9, 2, 9, 9, 3], [9, 9], [(3, 5)]),
        # One alone, none, one that is cut off, and a prompt that is shorter.
        ([1, 2, 9, 3], [9], []),
        ([1, 2, 3], [9], []),
        ([8, 1, 8, 9, 2, 8], [8, 9], []),
        ([8], [8, 9], []),
        ([], [9], []),
        # The bytes of the separator stand across two tokens, then whole.
        ([1 << 32, 5 << 32, 1, 7, 1, 3], [1], [(3, 4)]),
        ([256, 1, 256, 4, 256, 1, 5, 1, 6], [1], [(2, 5), (6, 7)]),
    ],
)
def test_segments_stand_between_separators(tokens: list[int], by: list[int], found: list[tuple[int, int]]) -> None:
    assert separator.segments(tokens, by) == found


def server_model(folder: Path, **more: Any) -> Any:
    """The configuration of a model whose tokenizer has a token for each word of a few, and one for `<sep>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(("<unk>", "<s>", "#", "<sep>", "a"))}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", additional_special_tokens=["<sep>"])
    tokenizer.save_pretrained(folder)
    given = {"skip_tokenizer_init": False, "tokenizer": str(folder), "runner_type": "generate", "tokenizer_mode": "auto"}
    return SimpleNamespace(**given | {"tokenizer_revision": None, "trust_remote_code": False, "hf_config": None, "model": None} | more)


def test_a_prompt_with_separators_is_blended_like_one_whose_segments_are_named(tmp_path: Path) -> None:
    plans = planner(blend_special_str=" # # ", model=server_model(tmp_path))
    tokens = PROMPT[:20] + [2, 2] + PROMPT[20:90] + [2, 2] + PROMPT[90:150] + [2, 2] + PROMPT[150:]
    found, named = request(tokens, places=None, blend=True), request(tokens, places=[[22, 92], [94, 154]])
    for asked in (found, named):
        assert plans.takes(asked)
    assert found.block_hashes == named.block_hashes
    plans.matched("a", 0)
    plans.allocated("a", list(range(20)), 160)
    (job,) = plans.jobs()
    # Segments are stored behind all that stands before the first, its separator too.
    assert (job.asked.segments, job.asked.anchor) == ([(22, 92), (94, 154)], tokens[:22])
    assert not plans.takes(request(tokens, places=None)), "requests have to ask"
    assert not plans.takes(request(tokens, places=None, blend=False))
    assert plans.counts() == {}
    assert plans.takes(request(tokens, places=PLACES, blend=True)), "places outrank the separator"
    plans.allocated("a", list(range(20)), 160)
    assert plans.jobs()[0].asked.segments == [(20, 90), (90, 150)]


@pytest.mark.parametrize(
    ("tokens", "asking", "cause"),
    [
        (PROMPT, {}, "separator"),
        (PROMPT[:50] + [3] + PROMPT[50:], {}, "separator"),
        ([*PROMPT[:50], 3, *PROMPT[50:90], 3], {}, "invalid"),
        ([*PROMPT[:50], 3, *PROMPT[50:90], 3, 5], {"blend": "yes"}, "invalid"),
    ],
)
def test_a_prompt_that_cannot_be_separated_is_computed(tokens: list[int], asking: dict[str, Any], cause: str, tmp_path: Path) -> None:
    plans, asked = planner(blend_special_str="<sep>", model=server_model(tmp_path)), request(tokens, places=None, **{"blend": True} | asking)
    assert not plans.takes(asked)
    assert (plans.counts(), asked.cache_salt) == ({f"blend_computed_{cause}": 1}, None)


def test_without_a_question_other_selectors_go_on(tmp_path: Path) -> None:
    plans = planner(blend_special_str="<sep>", model=server_model(tmp_path))
    assert plans.takes(request([*PROMPT[:50], 3, *PROMPT[50:90], 3], places=None, blend=True, blend_select="first-k"))


def test_a_request_that_asks_for_segments_of_a_server_without_a_separator_is_computed() -> None:
    plans = planner()
    assert not plans.takes(request(places=None, blend=True))
    assert plans.counts() == {"blend_computed_invalid": 1}


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [(" # # ", {"skip_tokenizer_init": True}, "start it without --skip-tokenizer-init"), ("  ", {}, "has no tokens in this tokenizer")],
)
def test_a_server_that_cannot_tokenise_the_separator_does_not_start(text: str, more: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        planner(blend_special_str=text, model=server_model(tmp_path, **more))
