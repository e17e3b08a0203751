"""Blending in real vLLM: exact where it must be, an answer of vLLM's own where a segment cannot be reused, and nobody else's tokens change."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import HERE, PATIENCE_S, environment, settings

#: Of the prompt of three segments: whole blocks of 32 tokens up to the last segment's end, and the
#: segments' tokens among them.
COVERED, REUSED = 416, 378


def run(script: str, folder: Path, model: str, *more: str, separate: bool = False) -> dict[str, Any]:
    """What a script writes."""
    command = [sys.executable, HERE / script, model, folder / "cache", folder / "result.json", *more]
    # A script looks into workers of other processes by functions of its own.
    variables = environment(folder, separate) | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads((folder / "result.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def seen(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What blending.py saw."""
    return run("blending.py", tmp_path_factory.mktemp("blending"), model)


@pytest.mark.ci
def test_segments_are_stored_once(seen: dict[str, Any]) -> None:
    assert [had for had, *_ in seen["stored"]] == [False] * 4
    assert all(computed > 0 and again == 0 and has for _, computed, again, has in seen["stored"])


@pytest.mark.ci
def test_all_tokens_computed_anew_are_vllms_own_prefill_bit_for_bit(seen: dict[str, Any]) -> None:
    exact = seen["exactness"]
    assert exact["exact"] == exact["plain"]
    assert exact["all"]["tokens"] == exact["plain"]
    assert exact["all"]["cached"] == exact["all"]["covered"], "what was blended must be loaded"
    assert exact["all_bits"]["largest"] > 1, "there must be numbers to compare"
    assert exact["all_bits"]["equal"], exact["all_bits"]


@pytest.mark.ci
def test_a_segment_at_its_stored_place_is_a_plain_prefix_bit_for_bit(seen: dict[str, Any]) -> None:
    exact = seen["exactness"]
    assert (exact["in_place"]["reused"], exact["in_place"]["cached"]) == (232, 256)
    assert exact["in_place_bits"]["equal"], exact["in_place_bits"]
    assert exact["in_place"]["tokens"] == exact["in_place_plain"]


@pytest.mark.ci
def test_runs_of_rows_among_exact_ones_are_computed_as_in_a_pass_over_all(seen: dict[str, Any]) -> None:
    runs = seen["runs"]
    assert (runs["rows"], runs["largest"] > 1) == (59, True)
    # Kernels of other shapes round otherwise.
    assert max(runs["kv"], runs["hidden"]) < 1e-4, runs


@pytest.mark.ci
def test_keys_of_layer_0_at_other_places_are_fresh_ones_but_for_rounding(seen: dict[str, Any]) -> None:
    zero = seen["layer zero"]
    assert zero["largest"] > 1
    assert zero["keys"] < 1e-5 * zero["largest"]
    assert zero["values"] == 0


@pytest.mark.ci
def test_several_check_layers_give_what_dropping_rows_between_layers_does(seen: dict[str, Any]) -> None:
    dropping = seen["dropping"]
    assert dropping["chosen"] == [True, round(0.1 * REUSED)]
    assert min(dropping["changed"]) > 1e-2, "something must have been computed anew in every layer"
    # Kernels of other shapes round otherwise.
    assert dropping["apart"] < 1e-4, dropping


@pytest.mark.ci
def test_a_threshold_computes_those_tokens_alone_that_are_so_far(seen: dict[str, Any]) -> None:
    thresholds = seen["thresholds"]
    right, over, of = thresholds["all"]
    assert right and 0.4 * of < over < 0.6 * of, thresholds
    right, both, most = thresholds["some"]
    assert right and 0 < both < most, thresholds
    assert thresholds["none"] == thresholds["later"] == []
    assert thresholds["first"]
    assert seen["arms"]["threshold"] == {"recomputed": 0, "other": True}


@pytest.mark.ci
def test_the_last_check_layers_share_is_computed_to_the_end(seen: dict[str, Any]) -> None:
    arms = seen["arms"]
    assert arms["layers"]["recomputed"] == round(0.1 * REUSED)
    assert arms["layers"]["recomputed"] + arms["layers"]["reused"] == REUSED
    assert arms["layers"]["cached"] == COVERED
    assert arms["layers, all"], "with all tokens at each check layer the answer is vLLM's own"


@pytest.mark.ci
@pytest.mark.parametrize("select", ["none", "first-k", "query", "deviation"])
def test_each_selector_computes_its_share_and_the_rest_is_loaded(seen: dict[str, Any], select: str) -> None:
    arm, share = seen["arms"][select], 0 if select == "none" else round(0.15 * REUSED)
    assert arm["states"] == ["reused"] * 3
    # Each segment's share is rounded.
    assert abs(arm["recomputed"] - share) <= 1
    assert arm["recomputed"] + arm["reused"] == REUSED
    assert (arm["covered"], arm["cached"]) == (COVERED, COVERED)
    assert arm["again"], "the same blend is made once"


@pytest.mark.ci
def test_with_every_token_computed_anew_the_answer_is_vllms_own(seen: dict[str, Any]) -> None:
    assert seen["arms"]["full ratio"] == {"first-k": True, "query": True, "deviation": True}


@pytest.mark.ci
def test_nobody_meets_blended_kv_without_asking(seen: dict[str, Any]) -> None:
    arms = seen["arms"]
    assert any(arms[select]["tokens"] != arms["plain"] for select in ("none", "first-k", "query", "deviation")), "blends must show"
    assert (arms["afterwards"]["tokens"], arms["afterwards"]["cached"]) == (arms["plain"], 0)
    assert arms["from the cache"]["tokens"] == arms["plain"]
    assert arms["from the cache"]["cached"] > 0, "the plain prompt is stored, and loaded"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("why", "state"),
    [("wrong sign", "gate"), ("wrong pairs", "gate"), ("flipped", "failed"), ("missing", "missing")],
)
def test_what_cannot_be_reused_is_computed(seen: dict[str, Any], why: str, state: str) -> None:
    hole = seen["holes"][why]
    assert hole["states"] == [state] * 2
    assert hole["right"], "the answer must be vLLM's own"
    assert hole["cached"] > 0


@pytest.mark.ci
def test_the_same_prompt_without_that_trouble_is_reused(seen: dict[str, Any]) -> None:
    assert seen["holes"]["right"]["states"] == ["reused"] * 2
    assert not seen["holes"]["right"]["right"], "otherwise the holes above show nothing"
    assert seen["holes"]["other anchor"] == ["missing"] * 2


@pytest.mark.ci
def test_arguments_that_make_no_sense_are_named(seen: dict[str, Any]) -> None:
    words = {
        "none": "no segments",
        "order": "must ascend",
        "end": "end in the prompt",
        "selector": "use one of query",
        "ratio": "ratio is 1.5",
        "outside": "position 25",
        "question": "no token follows",
        "layer": "check_layer is 9",
        "shares": "one share for each layer",
        "descending": "ascending order",
        "growing": "no share may be larger",
        "several": "deviation alone",
        "last layer": "check_layer is 4",
        "threshold": "threshold is -0.1",
        "thresholds": "one threshold for each layer",
        "compared": "threshold is for what select deviation compares",
        "short": "no whole block of 32",
        "long": "max_model_len",
    }
    assert {name for name, word in words.items() if word not in seen["refused"][name]} == set(), seen["refused"]


def test_blends_between_the_steps_of_other_requests_change_none_of_their_tokens(model: str, tmp_path: Path) -> None:
    live = run("blending_live.py", tmp_path, model, separate=True)
    assert live["under way"] == 3
    assert live["beside"] == live["alone"]
    assert live["states"] == [["reused"] * 3] * 2
    assert [made["cached"] for made in live["blended"]] == [COVERED] * 2
    assert live["blended"][1]["tokens"] == live["whole"]


@pytest.fixture(scope="module")
def parallel(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What blending_parallel.py saw with one worker, and with two."""
    one, two = (
        run("blending_parallel.py", tmp_path_factory.mktemp(f"workers{workers}"), model, str(workers), separate=True) for workers in (1, 2)
    )
    return one, two


def test_two_workers_blend_as_one_does(parallel: tuple[dict[str, Any], dict[str, Any]]) -> None:
    one, two = parallel
    assert len(two["shards"]) == 2, two["shards"]
    assert two["plain"] == one["plain"]
    for select in ("none", "first-k", "query", "deviation", "stores", "script"):
        assert two[select] == one[select], select
        assert two[select]["cached"] == COVERED
    assert two["none"]["tokens"] != two["plain"], "blends must show"
    assert two["query"]["tokens"] == two["script"]["tokens"]
    assert two["layers"] == one["layers"]
    assert two["layers"]["recomputed"] == round(0.1 * REUSED)
    assert two["bounded"] == one["bounded"]
    assert 0 < two["bounded"]["recomputed"] < REUSED
    for select in ("first-k", "query", "deviation"):
        assert two[f"all {select}"]["tokens"] == two["plain"], select
        assert two[f"all {select}"]["counts"]["blend_segments_reused"] == 3, "counted once, not by each worker"


def test_what_one_of_two_workers_has_lost_is_computed_by_both(parallel: tuple[dict[str, Any], dict[str, Any]]) -> None:
    _, two = parallel
    assert two["cleared"] == [False, True]
    for why, count in (("flipped", "blend_computed_failed"), ("lost", "blend_computed_missing"), ("missing", "blend_computed_missing")):
        assert two[why]["tokens"] == two["plain"], why
        assert two[why]["counts"][count] == 1, (why, two[why]["counts"])
    assert two["whole again"] == two["none"], "stored anew by the worker that had lost it"


def test_a_model_with_sliding_windows_is_refused_by_name(models: Callable[..., str], tmp_path: Path) -> None:
    code = (
        "import json, sys; from vllm import LLM; from forebay.vllm.blend import Blend, BlendError\n"
        "model, cache = sys.argv[1], json.loads(sys.argv[2])\n"
        'transfer = {"kv_connector": "ForebayConnector", "kv_role": "kv_both", "kv_connector_extra_config": cache}\n'
        'llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=1024, skip_tokenizer_init=True, kv_transfer_config=transfer,\n'
        '    worker_extension_cls="forebay.vllm.blend.worker.BlendWorker")\n'
        "try: Blend(llm)\n"
        "except BlendError as error: print('REFUSED', error)\n"
    )
    command = [sys.executable, "-c", code, models("float32", "gemma"), json.dumps(settings(tmp_path / "cache"))]
    done = subprocess.run(command, env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert re.search(r"REFUSED blending does not work with \d KV cache groups", done.stdout), done.stdout[-2000:]


def configuration(**change: Any) -> Any:
    """As much of vLLM's configuration as is looked at, with one thing changed: `part__name=value`."""
    parts: dict[str, Any] = {
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        "model_config": {"uses_mrope": False, "is_multimodal_model": False, "dtype": "torch.bfloat16"},
        "cache_config": {"cache_dtype": "auto"},
        "kv_transfer_config": {"kv_connector": "ForebayConnector", "kv_role": "kv_both"},
    }
    whole: dict[str, Any] = {"speculative_config": None, "lora_config": None}
    for name, value in change.items():
        part, _, key = name.partition("__")
        if key:
            parts[part][key] = value
        else:
            whole[part] = value
    return SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in parts.items()} | whole)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism of 2"),
        ({"parallel_config__data_parallel_size": 2}, "data parallelism of 2"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode context parallelism of 2"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA"),
        ({"model_config__uses_mrope": True}, "mRoPE"),
        ({"model_config__is_multimodal_model": True}, "multimodal"),
        ({"cache_config__cache_dtype": "fp8"}, "a KV cache of fp8"),
        ({"kv_transfer_config": None}, "without ForebayConnector"),
        ({"kv_transfer_config__kv_connector": "MultiConnector"}, "without ForebayConnector"),
        ({"kv_transfer_config__kv_role": "kv_consumer"}, "role kv_consumer"),
    ],
)
def test_configurations_are_refused_by_name(change: dict[str, Any], name: str) -> None:
    from forebay.vllm.blend import refuse
    from forebay.vllm.geometry import Unsupported

    refuse.configuration(configuration())
    with pytest.raises(Unsupported, match=name):
        refuse.configuration(configuration(**change))


@pytest.mark.ci
def test_a_connector_of_several_groups_is_refused_by_name() -> None:
    from forebay.vllm.blend.blender import Connector
    from forebay.vllm.geometry import Unsupported

    with pytest.raises(Unsupported, match="2 KV cache groups"):
        Connector(None, SimpleNamespace(block_tokens=(16, 16)), {})  # type: ignore[arg-type]


#: What each of two workers does; argument: a file that they meet in, and the worker's number.
AGREEING = """
import json, sys, types
import torch, torch.distributed, vllm.distributed
rank = int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
group = types.SimpleNamespace(rank_in_group=rank, world_size=2, cpu_group=torch.distributed.group.WORLD)
vllm.distributed.get_tp_group = lambda: group
from forebay.vllm.blend.ranks import Ranks
ranks = Ranks()
flags = ranks.all([True, rank == 0, rank == 1, False])
total = ranks.total(torch.tensor([0.1, 1e8, 3.0]) * (rank + 1))
print(json.dumps([flags, ranks.all([]), total.tolist(), total.numpy().tobytes().hex()]))
ranks.leave(ValueError("all of them refuse it"))
# Gloo may abort a process that ends without this, when the other is gone.
torch.distributed.destroy_process_group()
ranks.leave(RuntimeError("this one alone"))
"""


@pytest.mark.ci
def test_workers_agree_to_the_last_bit_and_one_that_fails_alone_leaves(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", AGREEING, tmp_path / "meeting", str(rank)] for rank in (0, 1)]
    started = [subprocess.Popen(one, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for one in commands]
    said = [one.communicate(timeout=PATIENCE_S) for one in started]
    assert all(one.returncode != 0 for one in started), said
    assert all("worker " in errors and "this one alone" in errors for _, errors in said), said
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in said)
    assert first == second
    assert first[:2] == [[True, False, False, False], []]
    assert first[2] == pytest.approx([0.3, 3e8, 9.0])


@pytest.mark.ci
def test_rows_are_cut_into_runs_of_no_more_than_a_step() -> None:
    from forebay.vllm.blend.nested import pieces

    rows = [0, 1, 2, 5, 6, 9, 11, 12, 13, 14]
    assert list(pieces(rows, 100)) == [[(0, 3), (5, 7), (9, 10), (11, 15)]]
    assert list(pieces(rows, 4)) == [[(0, 3), (5, 6)], [(6, 7), (9, 10), (11, 13)], [(13, 15)]]
    assert list(pieces([], 4)) == []


@pytest.mark.ci
def test_attention_is_a_softmax_over_earlier_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from forebay.vllm.blend import selection

    torch.manual_seed(1)
    queries, keys = torch.randn(3, 4, 8), torch.randn(10, 2, 8)
    mass = selection.attention(queries, keys, 7, 0.5)
    wanted = torch.zeros(10)
    for query in range(3):
        for head in range(4):
            logits = torch.stack([queries[query, head] @ keys[row, head // 2] * 0.5 for row in range(8 + query)])
            wanted[: 8 + query] += logits.softmax(0)
    assert torch.allclose(mass, wanted, atol=1e-5)
    assert torch.allclose(selection.attention(queries, keys, 7, 0.5, at_once=2), wanted, atol=1e-5)
    # Two queries at a time, then one.
    for most in (2 * 2 * 10, 1):
        monkeypatch.setattr(selection, "MOST_LOGITS", most)
        assert torch.allclose(selection.attention(queries, keys, 7, 0.5), wanted, atol=1e-5)
    assert selection.largest(mass, [2, 3, 4, 5], 2) == sorted(sorted([2, 3, 4, 5], key=lambda row: -float(mass[row]))[:2])


@pytest.mark.ci
def test_scores_are_computed_where_a_gpus_rows_are() -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from forebay.vllm.blend import selection
    from forebay.vllm.blend.segments import Dimensions, Rows

    # Tensors without memory: where each would be is known, and two places in one operation are an
    # error.
    with FakeTensorMode():
        gpu = torch.device("cuda", 0)
        rows, at = Rows(Dimensions(2, 2, 8, torch.bfloat16), 20, gpu), torch.arange(3, 7, device=gpu)
        fresh = torch.empty(4, 2, 8, dtype=torch.bfloat16, device=gpu)
        rows.put(1, at, (fresh, fresh))
        assert selection.deviation((fresh, fresh), (rows.keys(1)[at], rows.values(1)[at])).device == gpu
        assert selection.attention(torch.empty(4, 4, 8, device=gpu), rows.keys(1)[:12], 8, 0.5).device == gpu


@pytest.mark.ci
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_long_questions_are_scored_in_bounded_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from forebay.vllm.blend import selection

    made, matmul = [], torch.matmul

    def noted(*of: torch.Tensor) -> torch.Tensor:
        made.append(matmul(*of))
        return made[-1]

    monkeypatch.setattr(torch, "matmul", noted)
    with FakeTensorMode():
        queries, keys = torch.empty(2000, 32, 8, device=device), torch.empty(32_768, 2, 8, device=device)
        selection.attention(queries, keys, 30_768, 0.5)
    assert max(logits.numel() for logits in made) <= selection.MOST_LOGITS
    assert sum(logits.numel() for logits in made) == 2000 * 32 * 32_768


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "refused"), [("cpu", False), ("cuda", False), ("xpu", True)])
def test_devices_that_nothing_has_run_on_are_refused_by_name(kind: str, refused: bool) -> None:
    import torch

    from forebay.vllm.blend import refuse
    from forebay.vllm.geometry import Unsupported

    # What is refused next, whatever the device.
    runner = SimpleNamespace(device=torch.device(kind), attn_groups=[[], []])
    with pytest.raises(Unsupported, match=f"KV on {kind}" if refused else "2 KV cache groups"):
        refuse.runner(runner)
