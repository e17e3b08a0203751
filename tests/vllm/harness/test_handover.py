"""What ranks and servers share: KV that is the same on every rank is stored once; what one server stores another one waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

from .server import Server, Shape

PROMPT = [4 + i * 11 % 500 for i in range(300)]
#: Whole chunks of 32 tokens in it, but for its last token.
WHOLE = 288


def finish(server: Server) -> None:
    """To the end, and everything is right."""
    server.drain()
    server.check_outputs()
    server.check_empty()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["step-by-step", "ahead"])
def test_with_mla_one_rank_stores_and_all_ranks_load(tmp_path: Path, device: str, asynchronous: bool) -> None:
    patient = {"max_held_blocks": 1000, "gather_patience_ms": 20_000}
    shape = Shape(asynchronous=asynchronous, ranks=3, mla=True, device=device, settings=patient)
    for loaded in (0, WHOLE):
        server = Server(shape, tmp_path)
        server.ask("a", PROMPT, 8)
        finish(server)
        assert server.loaded_tokens == loaded
        stats = [rank.connector._worker.stats() for rank in server.runner.ranks]
        assert [s["loaded_tokens"] for s in stats] == [loaded] * 3
        assert [s["saves"] > 0 for s in stats[1:]] == [False, False]
        assert loaded or stats[0]["saves"] > 0
        server.until_stored(PROMPT, WHOLE)
        server.close()
    # The namespace of the one that stores serves any number of ranks.
    server = Server(Shape(ranks=1, mla=True, device=device), tmp_path)
    server.ask("a", PROMPT, 8)
    finish(server)
    assert server.loaded_tokens == WHOLE
    server.close()


def test_a_consumer_waits_for_what_a_producer_has_promised(tmp_path: Path, device: str) -> None:
    # Nothing is given up, however slow this machine is: neither copies out of a finished request's blocks, nor the waiting.
    patient = {"max_held_blocks": 1000, "load_timeout_ms": 60_000, "gather_patience_ms": 20_000}
    producer = Server(Shape(role="kv_producer", device=device, settings=patient), tmp_path)
    consumer = Server(Shape(role="kv_consumer", device=device, settings=patient), tmp_path)
    # So that the producer has a segment open, and sheds nothing.
    producer.ask("other", PROMPT[::-1], 1)
    finish(producer)
    producer.until_stored(PROMPT[::-1], WHOLE)
    producer.ask("a", PROMPT, 1)
    promise = {"num_transferred_tokens": WHOLE}
    # It asks before the producer has computed a token.
    consumer.ask("a", PROMPT, 8, kv_transfer_params=promise)
    for _ in range(3):
        consumer.step()
    assert consumer.scheduler.connector._scheduler.stats()["scheduler_awaited"] > 0
    finish(producer)
    assert producer.handed_over["a"] == promise
    finish(consumer)
    assert consumer.loaded_tokens == WHOLE, "nothing was computed twice"
    # What was handed over before is stored no second time.
    saves = producer.scheduler.connector._scheduler.stats()["scheduler_save_tokens"]
    producer.ask("b", PROMPT, 1, kv_transfer_params=promise)
    finish(producer)
    assert producer.scheduler.connector._scheduler.stats()["scheduler_save_tokens"] == saves
    producer.close()
    consumer.close()


@pytest.mark.parametrize("promise", [10**9, -1, "many", None, 2.5])
def test_a_promise_that_is_wrong_costs_time_and_nothing_else(tmp_path: Path, device: str, promise: object) -> None:
    server = Server(Shape(device=device, settings={"load_timeout_ms": 20}), tmp_path)
    server.ask("a", PROMPT, 4, kv_transfer_params={"num_transferred_tokens": promise})
    finish(server)
    assert server.loaded_tokens == 0
    server.close()


@pytest.mark.parametrize("params", ["text", 5, ["num_transferred_tokens"], True])
def test_parameters_that_are_no_dictionary_count_as_none(tmp_path: Path, device: str, params: object) -> None:
    server = Server(Shape(device=device), tmp_path)
    # A client sets these through `vllm_xargs`: vLLM does not check what they are.
    server.ask("a", PROMPT, 4, kv_transfer_params=params)
    finish(server)
    assert server.loaded_tokens == 0
    server.close()
