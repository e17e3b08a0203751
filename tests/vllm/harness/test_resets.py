"""A reset of the connector's cache while requests run: vLLM does it for new weights, and its API on demand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine.core import EngineCore

from .server import Server, Shape

PROMPT = [4 + i * 11 % 500 for i in range(300)]


def test_a_request_that_ends_after_a_reset_has_its_gathers_given_up_before_its_blocks_are_reused(tmp_path: Path, device: str) -> None:
    server = Server(Shape(device=device), tmp_path)
    server.ask("a", PROMPT, 40)
    for _ in range(4):
        server.step()
    assert server.scheduler.reset_connector_cache()
    server.abort("a")
    assert not server.scheduler.requests, "vLLM keeps no blocks of it"
    output = server.scheduler.schedule()
    assert output.finished_req_ids == {"a"}
    assert output.kv_connector_metadata.preempts, "its gathers would go on while the model overwrites its blocks"
    server.queue.append((output, server.runner.execute(output, [])))
    server.drain()
    server.check_empty()
    server.close()


def test_stores_that_wait_for_a_requests_end_do_not_outlive_a_reset(tmp_path: Path, device: str) -> None:
    patient = {"store_when": "finished", "max_held_blocks": 1000, "gather_patience_ms": 20_000, "load_timeout_ms": 20_000}
    server = Server(Shape(device=device, settings=patient), tmp_path)
    server.ask("a", PROMPT, 4)
    while server.asked["a"].finished is None:
        server.step()
    half = server.scheduler.connector._scheduler
    assert half.stats()["scheduler_saves"] == 1, "the next step would start it"
    assert server.scheduler.reset_connector_cache()
    server.drain()
    assert [rank.connector._worker.stats()["saves"] for rank in server.runner.ranks] == [0, 0]
    server.check_empty()
    server.close()


def test_the_workers_and_scripts_hear_of_a_reset(tmp_path: Path) -> None:
    server, called = Server(Shape(), tmp_path), list[str]()
    other: Any = SimpleNamespace(scheduler=SimpleNamespace(connector=None))
    core: Any = SimpleNamespace(scheduler=server.scheduler)
    for one in (core, other):
        one.model_executor = SimpleNamespace(collective_rpc=lambda method, *_: called.append(method) or [{"result": 1}])

    def stored(by: Any) -> Any:
        return EngineCore.collective_rpc(by, "forebay_blend_store", args=([], [1, 2]))

    server.ask("a", PROMPT, 40)
    assert not server.scheduler.schedule().kv_connector_metadata.rests
    assert stored(core) == [{"result": 1}]
    assert server.scheduler.reset_connector_cache()
    # No step has been since.
    assert "restarted" in stored(core)[0]["error"]
    assert stored(other) == EngineCore.collective_rpc(core, "check_health") == [{"result": 1}]
    assert called == ["forebay_blend_store"] * 2 + ["check_health"]
    assert server.scheduler.schedule().kv_connector_metadata.rests
    server.close()
