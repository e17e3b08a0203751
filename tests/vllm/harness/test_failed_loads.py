"""Failed loads: what vLLM does with synchronous ones, and that ours come to a right end."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forebay.vllm import checks
from forebay.vllm.connector import ForebayConnector
from vllm.config import ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from . import damage
from .kv import generated
from .runner import WrongKv
from .server import Server, Shape, _kv, vllm_config

PROMPT = list(range(20, 120))
REJECTING = {"connector": "RejectingConnector", "connector_module": "harness.rejecting"}
RUNNERS = pytest.mark.parametrize("second", [False, True], ids=["runner-v1", "runner-v2"])


def run(server: Server, most_steps: int = 60) -> None:
    """Steps until all is done, or long enough that nothing more is to be expected."""
    while server.steps < most_steps and server.step():
        pass


@RUNNERS
def test_vllm_recovers_from_a_failed_synchronous_load_step_by_step(second: bool, tmp_path: Path) -> None:
    server = Server(Shape(second_runner=second, **REJECTING), tmp_path)
    server.ask("a", PROMPT, 6)
    server.drain()
    server.check_outputs()
    assert server.runner.excused > 0


@RUNNERS
def test_vllm_computes_the_step_in_flight_from_kv_that_was_never_loaded(second: bool, tmp_path: Path) -> None:
    server = Server(Shape(asynchronous=True, second_runner=second, **REJECTING), tmp_path)
    server.ask("a", PROMPT, 6)
    with pytest.raises(WrongKv, match="never written"):
        run(server)


@RUNNERS
def test_vllm_emits_the_token_of_the_step_in_flight(second: bool, tmp_path: Path) -> None:
    server = Server(Shape(asynchronous=True, second_runner=second, **REJECTING), tmp_path)
    server.runner.strict = False
    server.ask("a", PROMPT, 6)
    run(server)
    asked = server.asked["a"]
    print(f"emitted {asked.output}, right is {generated(PROMPT, 6)}")
    assert server.runner.wrong
    assert asked.output and asked.output[0] != generated(PROMPT, 6)[0]


@RUNNERS
def test_vllm_hangs_one_token_short(second: bool, tmp_path: Path) -> None:
    # The prompt fills a step exactly. Computed anew it does not fit: vLLM still keeps a place for the token that it dropped.
    server = Server(Shape(asynchronous=True, second_runner=second, batch_tokens=64, **REJECTING), tmp_path)
    server.runner.strict = False
    server.ask("a", PROMPT[:64], 1)
    run(server)
    assert server.asked["a"].output == []
    assert server.asked["a"].finished is None
    assert server.scheduler.has_requests()


@RUNNERS
def test_vllm_shares_blocks_of_a_failed_synchronous_load_before_they_are_computed(second: bool, tmp_path: Path) -> None:
    # Step by step: the first request computes its prompt anew in parts, and the other one reads all of it at once.
    server = Server(Shape(second_runner=second, long_prefill_tokens=24, **REJECTING), tmp_path)
    server.ask("a", PROMPT, 6)
    server.ask("b", PROMPT + [7], 6)
    with pytest.raises(WrongKv, match="never written"):
        run(server)


FAILING = REJECTING | {"policy": "fail"}
AHEAD = pytest.mark.parametrize("asynchronous", [False, True], ids=["step-by-step", "ahead"])
#: All layers have a window, or the model's layers are those of several stages.
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "window": {"windows": (50,)}, "stages": {"stages": 3}}
WINDOWS_AND_STAGES = pytest.mark.parametrize("kind", KINDS)


def failing(kind: str, asynchronous: bool, second: bool, **more: Any) -> Shape:
    """A server of this kind whose loads fail."""
    if kind == "stages" and asynchronous and not second:
        pytest.skip("stages ahead need vLLM's second runner")
    return Shape(asynchronous=asynchronous, second_runner=second, **FAILING, **KINDS[kind], **more)


@RUNNERS
@AHEAD
@WINDOWS_AND_STAGES
def test_vllm_ends_one_request_with_an_error_and_no_token(kind: str, asynchronous: bool, second: bool, tmp_path: Path) -> None:
    server = Server(failing(kind, asynchronous, second), tmp_path)
    server.runner.strict = False
    server.ask("a", PROMPT, 6)
    run(server)
    assert (server.asked["a"].finished, server.asked["a"].output) == ("error", [])
    # Nothing of it is left in the prefix cache.
    server.runner.wrong.clear()
    server.ask("plain", PROMPT, 6)
    run(server)
    assert server.asked["plain"].output == generated(PROMPT, 6)
    assert not server.runner.wrong
    server.check_empty()


@RUNNERS
@AHEAD
@WINDOWS_AND_STAGES
def test_vllm_ends_requests_that_share_the_blocks_too(kind: str, asynchronous: bool, second: bool, tmp_path: Path) -> None:
    server = Server(failing(kind, asynchronous, second, batch_tokens=512), tmp_path)
    server.runner.strict = False
    server.ask("a", PROMPT, 6)
    server.ask("plain", [*PROMPT, 7], 6)
    run(server)
    assert [server.asked[name].finished for name in ("a", "plain")] == ["error", "error"]


@RUNNERS
@AHEAD
@WINDOWS_AND_STAGES
def test_vllm_keeps_the_blocks_of_an_aborted_request_in_its_prefix_cache(
    kind: str, asynchronous: bool, second: bool, tmp_path: Path
) -> None:
    server = Server(failing(kind, asynchronous, second), tmp_path)
    server.runner.strict = False
    server.ask("a", PROMPT, 6)
    # As a client that goes away while the step runs.
    while server.asked["a"].finished is None and not server.asked["a"].aborted:
        server.step(before_update=lambda: server.abort("a"))
    server.runner.wrong.clear()
    server.ask("plain", [*PROMPT, 7], 6)
    run(server)
    assert server.runner.wrong, "it reads what was never loaded"
    assert server.asked["plain"].output != generated([*PROMPT, 7], 6)


@RUNNERS
def test_vllm_preempts_no_request_before_the_failure_is_known(second: bool, tmp_path: Path) -> None:
    # While the step that loads for "a" is in flight, "plain" needs a block, and "a" has the last one. If vLLM preempted "a" for it,
    # nobody would look at the failed load, and the wrong token of "a" would be sent.
    server = Server(Shape(asynchronous=True, second_runner=second, blocks=11, **FAILING), tmp_path)
    server.runner.strict = False
    server.ask("plain", list(range(200, 245)), 20)
    for _ in range(3):
        server.step()
    server.ask("a", PROMPT, 6)
    run(server)
    assert server.preemptions == 0
    assert (server.asked["a"].finished, server.asked["a"].output) == ("error", [])
    assert server.asked["plain"].output == generated(list(range(200, 245)), 20)


#: With and without a window: what vLLM says depends on the number of groups alone.
GROUPS = pytest.mark.parametrize("windows", [(None, 50), (None, None)], ids=["window", "full"])


@RUNNERS
@AHEAD
@GROUPS
def test_vllm_raises_where_blocks_are_named_and_there_are_several_groups(
    windows: tuple[int | None, ...], asynchronous: bool, second: bool, tmp_path: Path
) -> None:
    server = Server(Shape(asynchronous=asynchronous, second_runner=second, windows=windows, **FAILING), tmp_path)
    server.ask("a", PROMPT, 6)
    with pytest.raises(RuntimeError, match="not supported for models with multiple KV cache groups"):
        run(server)


@RUNNERS
@AHEAD
@GROUPS
def test_vllm_sends_wrong_tokens_where_requests_are_named_whose_load_within_a_step_failed(
    windows: tuple[int | None, ...], asynchronous: bool, second: bool, tmp_path: Path
) -> None:
    # As vLLM's error above asks. It looks at requests that wait for their load, and this one runs.
    named = {"settings": {"reports": "requests"}}
    server = Server(Shape(asynchronous=asynchronous, second_runner=second, windows=windows, **FAILING, **named), tmp_path)
    server.runner.strict = False
    server.ask("a", PROMPT, 6)
    run(server)
    assert server.runner.wrong
    assert (server.asked["a"].finished, len(server.asked["a"].output)) == ("length", 6)
    assert server.asked["a"].output != generated(PROMPT, 6)


@RUNNERS
@AHEAD
@GROUPS
def test_vllm_raises_where_loads_within_a_step_are_said_to_be_over(
    windows: tuple[int | None, ...], asynchronous: bool, second: bool, tmp_path: Path
) -> None:
    # vLLM's aggregator passes a failed request on only where its load is over.
    named = {"settings": {"reports": "requests", "over": True}}
    server = Server(Shape(asynchronous=asynchronous, second_runner=second, windows=windows, **FAILING, **named), tmp_path)
    server.runner.strict = False
    server.ask("a", PROMPT, 6)
    with pytest.raises(AssertionError) as raised:
        run(server)
    assert raised.traceback[-1].name == "_update_from_kv_xfer_finished"


@pytest.mark.parametrize(
    "shape, flag",
    [
        (Shape(asynchronous=True, prefix_caching=False), "--no-async-scheduling"),
        (Shape(prefix_caching=True), "--no-enable-prefix-caching"),
        (Shape(prefix_caching=False, windows=(50,)), "a sliding window"),
        (Shape(policy="fail", windows=(None, 50)), "several KV cache groups"),
        (Shape(policy="fail", stages=2), "--pipeline-parallel-size"),
    ],
    ids=["async", "prefix-caching", "window", "groups", "stages"],
)
def test_layerwise_loads_are_refused_where_a_failed_one_would_do_harm(shape: Shape, flag: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=flag):
        Server(dataclasses.replace(shape, settings={"use_layerwise": True}), tmp_path)


@pytest.mark.parametrize("name", [None, *checks.SPARSE])
def test_layerwise_loads_are_refused_where_vllm_does_not_wait_for_layers(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(policy="fail", settings={"use_layerwise": True})
    config = vllm_config(shape, tmp_path)
    if name is None:
        # vLLM allows it with some GPUs' kernels only.
        monkeypatch.setattr(ParallelConfig, "use_ubatching", True)
    else:
        monkeypatch.setattr(config.model_config.hf_text_config, name, 1, raising=False)
    with pytest.raises(ValueError, match="microbatches" if name is None else "sparse attention"):
        ForebayConnector(config, KVConnectorRole.SCHEDULER, _kv(shape, 0))


def test_layerwise_loads_from_a_cache_that_keeps_what_is_damaged_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mode: ro"):
        Server(Shape(policy="fail", settings={"use_layerwise": True, "mode": "ro"}), tmp_path)


@RUNNERS
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_what_was_loaded_before_the_damage_is_kept(asynchronous: bool, second: bool, tmp_path: Path, device: str) -> None:
    patient = {"gather_patience_ms": 20_000, "max_held_blocks": 1000, "load_timeout_ms": 20_000}
    shape = Shape(asynchronous=asynchronous, second_runner=second, device=device, settings=patient)
    server = Server(shape, tmp_path)
    server.ask("a", PROMPT, 6)
    server.drain()
    server.until_stored(PROMPT, 96)
    server.close()
    assert damage.flip_last(tmp_path / "cache", 1) > 0
    server = Server(shape, tmp_path)
    server.ask("b", PROMPT, 6)
    computed = []
    while server.step(before_update=lambda: computed.append(server.queue[0][0].total_num_scheduled_tokens)):
        pass
    server.check_outputs()
    server.check_empty()
    server.close()
    assert server.failed_loads == 1
    # Of three chunks of 32 tokens the last one is damaged.
    assert max(computed) == len(PROMPT) - 64, computed


@RUNNERS
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
@pytest.mark.parametrize("kind", [damage.flip, damage.truncate, damage.remove_data], ids=lambda kind: kind.__name__)
def test_a_load_that_fails_on_one_worker_is_computed(
    kind: Callable[[Path, int, random.Random], int],
    layerwise: bool,
    asynchronous: bool,
    second: bool,
    tmp_path: Path,
    device: str,
) -> None:
    if layerwise and asynchronous:
        pytest.skip("refused at the start")
    shape = Shape(
        asynchronous=asynchronous,
        second_runner=second,
        prefix_caching=not layerwise,
        device=device,
        # All of the first prompt is stored, however slow this machine is.
        settings={"use_layerwise": layerwise, "gather_patience_ms": 20_000, "max_held_blocks": 1000},
    )
    for life in range(3):
        server = Server(shape, tmp_path)
        server.ask("a", PROMPT, 6)
        server.ask("b", PROMPT + PROMPT, 6)
        server.drain()
        server.check_outputs()
        server.check_empty()
        failed = server.failed_loads + server.runner.excused
        print(f"life {life}: {server.loaded_tokens} tokens loaded, {failed} loads failed")
        for rank in server.runner.ranks:
            print(f"rank {rank.rank}: {rank.connector._worker.stats()}")
        if life == 0:
            assert server.loaded_tokens == 0
            server.until_stored(PROMPT + PROMPT, 192)
        server.close()
        if life == 0:
            assert kind(tmp_path / "cache", 1, random.Random(7)) > 0
        elif kind is damage.flip and life == 1:
            assert failed > 0, "the damage was not met"
