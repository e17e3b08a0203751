"""`store_when: finished`: what a request computed is stored when it has ended, in one piece, and admission knows what was generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forebay
import pytest

from .server import Server, Shape

#: Nothing is given up, however slow this machine is.
SETTINGS = {"store_when": "finished", "max_held_blocks": 1000, "gather_patience_ms": 20_000, "load_timeout_ms": 20_000}
PROMPT = [4 + i * 11 % 500 for i in range(300)]
#: Whole chunks of 32 tokens in it, but for its last token.
WHOLE = 288


def saves(server: Server) -> list[int]:
    """Stores that were ordered, by the scheduler, and started, by each worker."""
    ordered = server.scheduler.connector._scheduler.stats()["scheduler_saves"]
    return [ordered, *(rank.connector._worker.stats()["saves"] for rank in server.runner.ranks)]


def loaded_again(shape: Shape, folder: Path) -> int:
    """Tokens of the prompt that a server started anew loads."""
    server = Server(shape, folder)
    server.ask("a", PROMPT, 8)
    server.drain()
    server.check_outputs()
    server.check_empty()
    server.close()
    return server.loaded_tokens


@pytest.mark.parametrize("asynchronous", [False, True], ids=["step-by-step", "ahead"])
def test_one_store_at_the_end_of_which_another_server_loads_everything(
    tmp_path: Path, device: str, asynchronous: bool
) -> None:
    shape = Shape(asynchronous=asynchronous, ranks=2, batch_tokens=64, device=device, settings=SETTINGS)
    server = Server(shape, tmp_path)
    server.ask("a", PROMPT, 40)
    for _ in range(20):
        assert server.step()
    assert saves(server) == [0, 0, 0], "while it runs nothing is stored, although its prompt is computed"
    server.drain()
    assert saves(server) == [1, 1, 1]
    server.check_outputs()
    server.check_empty()
    server.until_stored(PROMPT, WHOLE)
    server.close()
    assert loaded_again(shape, tmp_path) == WHOLE


def test_what_an_aborted_request_computed_is_stored_and_what_a_preempted_one_computes_again(tmp_path: Path, device: str) -> None:
    shape = Shape(ranks=2, batch_tokens=64, device=device, settings=SETTINGS)
    server = Server(shape, tmp_path)
    server.ask("a", PROMPT, 40)
    for _ in range(8):
        server.step()
    server.abort("a")
    server.drain()
    server.check_outputs()
    server.check_empty()
    server.until_stored(PROMPT, 64)
    server.close()
    assert 64 <= loaded_again(shape, tmp_path) <= WHOLE
    # Two requests that do not fit together.
    (tmp_path / "crowded").mkdir()
    crowded = Server(Shape(ranks=1, blocks=32, batch_tokens=512, device=device, settings=SETTINGS), tmp_path / "crowded")
    first, second = PROMPT[:200], PROMPT[50:250]
    crowded.ask("a", first, 100)
    crowded.ask("b", second, 100)
    crowded.drain()
    assert crowded.preemptions > 0
    crowded.check_outputs()
    crowded.check_empty()
    assert saves(crowded)[0] == 2, "each once"
    for name, prompt in (("a", first), ("b", second)):
        # The blocks are free as soon as they have been gathered.
        crowded.until_stored(prompt, 192)
        before = crowded.loaded_tokens
        crowded.reset()
        crowded.ask(f"{name}-again", prompt, 2)
        crowded.drain()
        assert crowded.loaded_tokens - before == 192, name
    crowded.close()


def test_a_request_that_was_loaded_within_a_step_keeps_its_blocks_until_they_are_stored(tmp_path: Path, device: str) -> None:
    settings = SETTINGS | {"use_layerwise": True, "max_sync_stall_ms": 20_000}
    server = Server(Shape(prefix_caching=False, device=device, settings=settings), tmp_path)
    server.ask("a", PROMPT[:200], 4)
    server.drain()
    server.until_stored(PROMPT[:200], 192)
    before = server.loaded_tokens
    server.ask("b", PROMPT, 8)
    while server.asked["b"].finished is None:
        assert server.step()
    assert server.loaded_tokens - before == 192
    assert "b" in server.scheduler.requests, "vLLM has given its blocks away while a store may still read them"
    server.drain()
    server.check_outputs()
    server.check_empty()
    server.until_stored(PROMPT, WHOLE)
    before = server.loaded_tokens
    server.ask("c", PROMPT, 4)
    server.drain()
    assert server.loaded_tokens - before == WHOLE
    server.check_outputs()
    server.close()


def test_beside_a_sliding_window_it_is_refused_at_the_start(tmp_path: Path) -> None:
    windowed: dict[str, Any] = {"windows": (None, 64), "settings": SETTINGS}
    with pytest.raises(forebay.ForebayError, match="use store_when: computed"):
        Server(Shape(**windowed), tmp_path)
