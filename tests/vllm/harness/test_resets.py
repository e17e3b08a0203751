"""A reset of the connector's cache while requests run: vLLM does it for new weights, and its API on demand."""

from __future__ import annotations

from pathlib import Path

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
