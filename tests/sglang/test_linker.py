"""The external linker through SGLang's real tree, wrapper and factory: every byte compared, and what happens when layers do not come."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forebay
import pytest
import sglang
import torch
from forebay.sglang import linker, weights
from linked import PAGE, PATIENCE_S, TOKENS, Server, prompt, served
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from test_controller import flip_bits
from world import weight_updater

MORE = list(range(70_000, 70_100))
KINDS = [("dsa", False), ("dsa", True), ("hybrid", False), ("hybrid", True)]


def queued(server: Server, tokens: list[int]) -> Any:
    """A request whose whole prefix SGLang has queued to be loaded."""
    req = server.request([*tokens, *MORE])
    assert server.match(req) == len(tokens)
    assert server.admit(req) == len(tokens)
    return req


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "drafts"), KINDS)
def test_a_prompt_is_loaded_after_a_restart_with_every_byte(cache: Path, kind: str, drafts: bool) -> None:
    with served(cache, kind, drafts=drafts) as server:
        stored = [server.compute(prompt(5, salt), seed=salt) for salt in (1, 2)]
        assert server.settle() == [True, True]
        # What is in the tree is not loaded.
        assert server.match(server.request([*prompt(5, 1), *MORE])) == 0
    with served(cache, kind, drafts=drafts) as server:
        assert server.match(server.request([*prompt(5, 3), *MORE])) == 0
        reqs = [queued(server, prompt(5, salt)) for salt in (1, 2)]
        assert server.forward(reqs, keep=reqs) == []
        assert [server.seen[req.rid] for req in reqs] == stored
        # The next batch has nothing to load.
        assert server.tree.ready_to_load_host_cache() == -1


@pytest.mark.ci
def test_a_prefix_that_needs_recurrent_state_is_resumed_only_where_there_is_some(cache: Path) -> None:
    with served(cache, "hybrid") as server:
        short = server.compute(prompt(3), seed=1)
        server.compute([*prompt(3), *prompt(2, 9)], seed=2)
        assert server.settle() == [True, True]
    with served(cache, "hybrid") as server:
        # The fourth page is stored, but the state after it is not.
        req = server.request([*prompt(3), *prompt(2, 9)[:PAGE], *MORE])
        assert server.match(req) == 3 * PAGE and server.admit(req) == 3 * PAGE
        assert server.forward([req], keep=[req]) == []
        assert server.seen[req.rid] == short


@pytest.mark.ci
def test_a_layer_is_let_go_when_it_is_there_and_not_before(cache: Path) -> None:
    with served(cache) as server:
        stored = server.compute(prompt(4), seed=1)
        server.settle()
    with served(cache) as server:
        gates = [threading.Event() for _ in range(server.layers)]
        slow(server, lambda layer: gates[layer // 2].wait(PATIENCE_S))
        req = queued(server, prompt(4))
        counter = server.linker.layer_done_counter
        index = server.tree.ready_to_load_host_cache()
        for layer, gate in enumerate(gates):
            assert not any(future.done() for future in counter.futures[index][layer:])
            gate.set()
            counter.set_consumer(index)
            counter.wait_until(layer)
        server.seen[req.rid] = server.loaded(req)
        assert server.tree.finish_external_linker_loads([req]) == [] and server.seen[req.rid] == stored


def slow(server: Server, before: Any, **calls: Any) -> None:
    """Has each of the engine's layers wait for `before` when it is waited for; `calls` are made instead of the load's."""
    source = server.linker._sources[PoolName.KV]

    class Slow:
        def __init__(self, load: Any) -> None:
            self._load = load

        def wait_layer(self, layer: int) -> Any:
            before(layer)
            return self._load.wait_layer(layer)

        def __getattr__(self, name: str) -> Any:
            return calls.get(name) or getattr(self._load, name)

    class Engine:
        def load(self, *given: Any, **named: Any) -> Any:
            return Slow(source.engine.load(*given, **named))

        def __getattr__(self, name: str) -> Any:
            return getattr(source.engine, name)

    server.linker._sources[PoolName.KV] = type(source)(**(vars(source) | {"engine": Engine()}))


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(2))
def test_damage_ends_the_request_with_an_error_and_is_not_offered_again(cache: Path, seed: int) -> None:
    with served(cache) as server:
        stored = server.compute(prompt(6), seed=1)
        server.settle()
    flip_bits(cache, 3, seed)
    with served(cache) as server:
        for _ in range(8):
            req = server.request([*prompt(6), *MORE])
            found = server.match(req)
            if not found:
                break
            assert server.admit(req) == found
            failed = server.forward([req], keep=[req])
            if not failed:
                # What is served is what was stored.
                pages = found // PAGE
                assert all(a == b[: len(a)] for x, y in zip(server.seen[req.rid], stored) for a, b in zip(x, y)) and pages
                break
            assert failed == [req] and req.skip_radix_cache_insert and "503" in repr(req.discard_output_reason.status_code.value)
        else:
            raise AssertionError("what is damaged is offered again and again")
        # It is computed, and stored anew.
        again = server.compute(prompt(6), seed=2)
        assert all(server.settle()) and again != stored


@pytest.mark.ci
def test_what_was_removed_between_lookup_and_load_is_computed(cache: Path) -> None:
    with served(cache) as server:
        server.compute(prompt(4), seed=1)
        server.settle()
    with served(cache) as server:
        req = server.request([*prompt(4), *MORE])
        assert server.match(req) == 4 * PAGE
        free = server.allocator.available_size()
        for source in server.linker._sources.values():
            source.engine.clear()
        assert server.admit(req) == 0 and server.allocator.available_size() == free
        assert server.forward([req]) == []


@pytest.mark.ci
def test_a_time_of_0_loads_nothing(cache: Path) -> None:
    with served(cache, more={"load_timeout_ms": 0}) as server:
        server.compute(prompt(4), seed=1)
        server.settle()
    with served(cache, more={"load_timeout_ms": 0}) as server:
        assert server.match(server.request([*prompt(4), *MORE])) == 0


@pytest.mark.ci
@pytest.mark.parametrize("place", ["extra config", "environment"])
def test_a_remote_store_is_left_alone(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "far").mkdir()
    url = f"file://{tmp_path}/far"
    if place == "environment":
        monkeypatch.setenv("FOREBAY_REMOTE_URL", url)
    with served(cache, more={"remote_url": url} if place == "extra config" else {}) as server:
        server.compute(prompt(4), seed=1)
        assert all(server.settle())
    assert not any((tmp_path / "far").iterdir()) and "remote_url" in caplog.text


@pytest.mark.ci
def test_a_load_that_is_late_ends_in_time_and_nothing_is_promised_for_a_while(cache: Path) -> None:
    with served(cache) as server:
        server.compute(prompt(4), seed=1)
        server.settle()
    with served(cache) as server:
        late, usual = queued(server, prompt(4)), server.linker._timeout_ms
        # As where no read comes back in time.
        server.linker._timeout_ms = 0
        assert server.forward([late]) == [late]
        server.linker._timeout_ms = usual
        req = server.request([*prompt(4), *MORE])
        assert server.match(req) == 0
        # The pause is over.
        server.linker._nothing_until = 0
        assert server.match(req) == 4 * PAGE and server.admit(req) == 4 * PAGE
        assert server.forward([req]) == []


@pytest.mark.ci
def test_the_time_of_a_load_is_over_though_others_were_before_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(cache) as server:
        for salt in (1, 2):
            server.compute(prompt(4, salt), seed=salt)
        assert server.settle() == [True, True]
    with served(cache) as server:
        begun, gate = threading.Event(), threading.Event()
        slow(server, lambda _: (begun.set(), gate.wait(PATIENCE_S)))
        indices = []
        for salt in (1, 2):
            queued(server, prompt(4, salt))
            indices.append(server.tree.ready_to_load_host_cache())
        assert begun.wait(PATIENCE_S)
        later = server.linker._timeout_ms / 1000
        monkeypatch.setattr(linker, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later))
        gate.set()
        assert [server.linker.finish_layer_wise_loading(index) for index in indices] == [True, False]


@pytest.mark.ci
def test_loads_that_are_cancelled_reset_and_closed(cache: Path) -> None:
    with served(cache) as server:
        server.compute(prompt(4), seed=1)
        server.settle()
    with served(cache) as server:
        req = queued(server, prompt(4))
        server.tree.linker.release_request(req.rid)
        assert server.tree.ready_to_load_host_cache() == -1 and server.tree.finish_external_linker_loads([req]) == []
        queued(server, prompt(4))
        server.tree.linker.reset()
        assert server.tree.ready_to_load_host_cache() == -1
        # A reset of the tree does not forget what is on the drive.
        req = queued(server, prompt(4))
        assert server.forward([req]) == []
        server.linker.close()
        server.linker.close()
        assert server.linker.lookup("r", [PoolTransfer(name=PoolName.KV, keys=["a"])]) == []


@pytest.mark.ci
@pytest.mark.parametrize("what", ["finish", "reset"])
def test_what_still_moves_is_waited_for_and_the_log_says_so(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with served(cache) as server:
        server.compute(prompt(4), seed=1)
        server.settle()
    with served(cache) as server:
        gate = threading.Event()
        # As where a device does not come back.
        slow(server, lambda _: gate.wait(PATIENCE_S))
        queued(server, prompt(4))
        index = server.tree.ready_to_load_host_cache()
        server.linker.layer_done_counter.fail(index, OSError("so that the layers are not waited for"))
        monkeypatch.setattr(linker, "CLOSE_TIMEOUT_MS", 50)
        call = server.linker.reset if what == "reset" else lambda: server.linker.finish_layer_wise_loading(index)
        waiting = threading.Thread(target=call)
        waiting.start()
        while "SGLang waits for" not in caplog.text:
            waiting.join(0.05)
            assert waiting.is_alive(), "its slots may still be written"
        monkeypatch.undo()
        gate.set()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()


@pytest.mark.ci
def test_close_leaves_alone_what_does_not_come_back(cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(cache) as server:
        stored = server.compute(prompt(4), seed=1)
        server.settle()
    with served(cache) as server:
        begun, gate = threading.Event(), threading.Event()
        slow(server, lambda _: (begun.set(), gate.wait(PATIENCE_S)))
        req = queued(server, prompt(4))
        server.tree.ready_to_load_host_cache()
        assert begun.wait(PATIENCE_S)
        monkeypatch.setattr(linker, "CLOSE_TIMEOUT_MS", 50)
        server.linker.close()
        assert "loads have not ended" in caplog.text and server.linker._loader._thread.is_alive()
        left = server.loaded(req)
        gate.set()
        server.linker._loader._thread.join(PATIENCE_S)
        assert not server.linker._loader._thread.is_alive()
        # After close nothing is written.
        assert server.loaded(req) == left
    monkeypatch.undo()
    with served(cache) as server:
        req = queued(server, prompt(4))
        assert server.forward([req], keep=[req]) == [] and server.seen[req.rid] == stored


@pytest.mark.ci
def test_an_error_while_a_failed_load_is_ended_keeps_no_pass_waiting(cache: Path) -> None:
    with served(cache) as server:
        server.compute(prompt(4), seed=1)
        server.settle()
    with served(cache) as server:
        source = server.linker._sources[PoolName.KV]

        def fail(*_: Any) -> Any:
            raise RuntimeError("as no engine does")

        slow(server, fail, cancel=fail)
        req = queued(server, prompt(4))
        assert server.forward([req]) == [req]
        # The thread goes on with the next.
        server.linker._sources[PoolName.KV], server.linker._nothing_until = source, 0
        req = queued(server, prompt(4))
        assert server.forward([req]) == []


@pytest.mark.ci
def test_once_the_weights_are_others_nothing_is_promised_loaded_or_stored(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updater = weight_updater(monkeypatch)
    with served(cache) as server:
        server.compute(prompt(4), seed=1)
        assert server.settle() == [True]
    with served(cache) as server:
        req = server.request([*prompt(4), *MORE])
        assert server.match(req) == 4 * PAGE
        # SGLang reads lost experts again; they are the same.
        assert updater.update_weights_from_disk(weight_name_filter=str) == "update_weights_from_disk"
        assert server.match(req) == 4 * PAGE
        assert updater.begin_weight_update() == "begin_weight_update"
        assert server.admit(req) == 0, "it was promised under the old weights"
        assert server.forward([req]) == [] and server.match(server.request([*prompt(4), *MORE])) == 0
        server.compute(prompt(3, 2), seed=2)
        assert server.settle() == [False]
    # After a restart.
    weight_updater(monkeypatch)
    with served(cache) as server:
        assert server.match(server.request([*prompt(3, 2), *MORE])) == 0, "KV of the new weights under the name of the old"
        assert server.match(server.request([*prompt(4), *MORE])) == 4 * PAGE


@pytest.mark.ci
def test_all_that_changes_weights_in_this_sglang_is_watched() -> None:
    file = Path(sglang.__file__).parents[1].joinpath(*weights.MODULE.split(".")).with_suffix(".py")
    defined = {item.name: item for item in ast.parse(file.read_text()).body if isinstance(item, ast.ClassDef)}[weights.CLASS]
    calls = {item.name for item in defined.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")}
    harmless = {"init_weights_update_group", "destroy_weights_update_group", "end_weight_update"}
    assert calls - harmless == set(weights.CALLS)


@pytest.mark.ci
def test_what_it_cannot_do_is_refused_at_the_start_and_by_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(word: str, **given: Any) -> None:
        with pytest.raises(Exception, match=word), served(cache, **given):
            pass

    refused("chunk_size", more={"chunk_size": 64})
    refused("no_such_setting", more={"no_such_setting": 1})
    refused("mode: ro", more={"mode": "ro"})
    refused("pipeline parallelism", pp_size=2)
    refused("_PlainKvStrategy", kind="plain")
    with pytest.raises(forebay.Unsupported, match="memory-saver"):
        linker._refuse(SimpleNamespace(enable_memory_saver=True), SimpleNamespace(pp_size=1))
    import sglang

    monkeypatch.setattr(sglang, "__version__", "0.5.22")
    refused("SGLang 0.5.22.*0.5.23")


def test_models_that_differ_do_not_see_each_others_pages(cache: Path) -> None:
    with served(cache) as server:
        server.compute(prompt(2), seed=1)
        server.settle()
    for given in ({"more": {"fingerprint": "other"}}, {"more": {"namespace": "other"}}, {"drafts": True}):
        with served(cache, **given) as server:
            assert server.match(server.request([*prompt(2), *MORE])) == 0
    with served(cache) as server:
        assert server.match(server.request([*prompt(2), *MORE])) == 2 * PAGE


def test_a_server_that_was_killed_loses_nothing_that_was_committed(cache: Path) -> None:
    with subprocess.Popen([sys.executable, __file__, "killed", str(cache)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and "stored" in child.stdout.read()
        assert child.wait(PATIENCE_S) == -signal.SIGKILL
    with served(cache, "hybrid") as server:
        expected = server.compute(prompt(4, 8), seed=1)
        req = queued(server, prompt(4))
        assert server.forward([req], keep=[req]) == [] and server.seen[req.rid] == expected


def test_reads_that_hang_end_the_request_in_time_and_slow_ones_are_waited_for(cache: Path, tmp_path: Path) -> None:
    with_held(cache, tmp_path, "reads")


def test_a_save_that_hangs_keeps_neither_the_tree_nor_reset_nor_close(cache: Path, tmp_path: Path) -> None:
    with_held(cache, tmp_path, "writes")


def with_held(cache: Path, tmp_path: Path, what: str) -> None:
    """Runs this file in a process whose reads or writes of the drive can be held."""
    shim, hold = tmp_path / "hold_io.so", tmp_path / "hold"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", shim, Path(__file__).parent / "hold_io.c", "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, __file__, what, str(cache), str(hold)],
        env=os.environ | {"LD_PRELOAD": str(shim), f"HOLD_{what.upper()}": str(hold)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0 and "held" in done.stdout


def held_writes(cache: Path, hold: Path) -> None:
    """Stores while writes are held for longer than any may take."""
    more = {"io_engine": "threads", "io_timeout_ms": 1000}
    with served(cache, "hybrid", more=more) as server:
        computed = {1: server.compute(prompt(4, 1), seed=1)}
        assert server.settle() == [True]
        hold.touch()
        # The tree keeps what is on its way to the drive until that has failed.
        computed[2] = server.compute(prompt(4, 2), seed=2)
        assert server.settle() == [False]
        # A reset does not wait for the drive, and what is computed then comes into the same slots.
        computed[3] = server.compute(prompt(4, 3), seed=3)
        flush(server)
        assert not server.linker._offloads and server.allocator.available_size() == TOKENS
        computed[4] = server.compute(prompt(4, 4), seed=4)
        server.linker.close()
        hold.unlink()
    with served(cache, "hybrid", more=more) as server:
        assert server.match(server.request([*prompt(4, 1), *MORE])) == 4 * PAGE
        for salt, expected in computed.items():
            req = server.request([*prompt(4, salt), *MORE])
            if server.match(req):
                # What was stored all the same has the bytes of its own prompt.
                assert server.admit(req) == 4 * PAGE and server.forward([req], keep=[req]) == []
                assert server.seen[req.rid] == expected
    print("held", flush=True)


def flush(server: Server) -> None:
    """What SGLang's `flush_cache` does."""
    server.tree.reset()
    server.requests.clear()
    server.allocator.clear()


def held(cache: Path, hold: Path) -> None:
    """Loads while reads are held: for a while, and for longer than a load may take."""
    more = {"io_engine": "threads", "io_timeout_ms": 60_000}
    with served(cache, "hybrid", more=more) as server:
        stored = server.compute(prompt(4), seed=1)
        assert server.settle() == [True]
    with served(cache, "hybrid", more=more) as server:
        hold.touch()
        slow = queued(server, prompt(4))
        index = server.tree.ready_to_load_host_cache()
        assert not server.linker.layer_done_counter.futures[index][0].done()
        hold.unlink()
        server.linker.layer_done_counter.set_consumer(index)
        for layer in range(server.layers):
            server.linker.layer_done_counter.wait_until(layer)
        assert server.loaded(slow) == stored and server.tree.finish_external_linker_loads([slow]) == []
        hold.touch()
        hung = queued(server, prompt(4))
        slots = server.tree.linker.private_load_indices[hung.rid]
        server.linker._timeout_ms, usual = 200, server.linker._timeout_ms
        assert server.forward([hung]) == [hung]
        left = server.content(slots)
        server.linker._timeout_ms = usual
        assert server.match(server.request([*prompt(4), *MORE])) == 0
        hold.unlink()
        server.linker._nothing_until = 0
        again = queued(server, prompt(4))
        assert server.forward([again], keep=[again]) == [] and server.seen[again.rid] == stored
        # What came too late was written nowhere.
        assert server.content(slots) == left
    print("held", flush=True)


def killed(cache: Path) -> None:
    """Stores a prompt, waits until it is durable and dies."""
    with served(cache, "hybrid") as server:
        server.compute(prompt(4), seed=1)
        assert server.settle() == [True]
        for source in server.linker._sources.values():
            source.engine.flush()
        print("stored", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def test_two_ranks_promise_and_refuse_alike(cache: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, __file__, "rank", str(cache), str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    try:
        said = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert [one.returncode for one in ranks] == [0, 0] and all("agreed" in text for text in said), said


def rank(cache: str, number: int, kind: str) -> None:
    """One of two tensor-parallel ranks, which agree over gloo."""
    group = torch.distributed.group.WORLD
    # Ranks of latent KV hold the same, those with recurrent state have their own.
    own = 0 if kind == "dsa" else number
    with served(Path(cache), kind, group=group) as server:
        stored = {salt: server.compute(prompt(4, salt), seed=10 * salt + own) for salt in (1, 2)}
        server.settle()
        torch.distributed.barrier()
        assert server.settle() == []
    with served(Path(cache), kind, group=group) as server:
        req = queued(server, prompt(4, 1))
        assert server.forward([req], keep=[req]) == [] and server.seen[req.rid] == stored[1]
        # One rank has lost what was promised: both refuse.
        req = server.request([*prompt(4, 2), *MORE])
        assert server.match(req) == 4 * PAGE
        torch.distributed.barrier()
        if number == 1:
            server.linker._nothing_until = float("inf")
        assert server.admit(req) == 0 and server.forward([req]) == []
        assert server.match(req) == 0
        server.linker._nothing_until = 0
        # A load fails on one rank: both end the request.
        req = queued(server, prompt(4, 2))
        if number == 1:
            server.linker._timeout_ms = 0
        assert server.forward([req]) == [req]
        torch.distributed.barrier()


if __name__ == "__main__":
    if sys.argv[1] == "killed":
        killed(Path(sys.argv[2]))
    elif sys.argv[1] in ("reads", "writes"):
        (held if sys.argv[1] == "reads" else held_writes)(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        where, which = sys.argv[2], int(sys.argv[3])
        torch.distributed.init_process_group("gloo", init_method=f"file://{where}-ranks", rank=which, world_size=2)
        for model in ("dsa", "hybrid"):
            rank(where, which, model)
        print("agreed", flush=True)
