import os, time, pytest, logging
from pathlib import Path
from harness.test_events import prompts, TOKENS
from harness.server import Server, Shape
from harness.test_events import BlockStored, BlockRemoved

@pytest.mark.parametrize("n", range(int(os.environ.get("N","10"))))
def test_loop(tmp_path, n):
    patient = {"max_held_blocks": 1000, "gather_patience_ms": 20_000, "load_timeout_ms": 20_000, "eviction_policy": "prefix", "store_when": "computed"}
    server = Server(Shape(ranks=1, blocks=128, batch_tokens=1024, events=True, device="cpu", settings=patient), tmp_path)
    w = server.runner.ranks[0].connector._worker
    t0=time.time()
    first=None
    for number, prompt in enumerate(prompts(5)):
        server.ask(f"r{number}", prompt, 2)
        server.drain()
        while w._engine.stats()["active_stores"]: time.sleep(0.001)
        there = w._engine.lookup(prompt)
        removed = sum(len(e.block_hashes) for e in server.events if isinstance(e, BlockRemoved))
        if removed and first is None:
            first = number; print("first removed at", number, removed)
        if there < 896:
            print("AT", number, "there", there, "removed", removed, w.stats(), time.time()-t0)
            for i in range(200):
                t = w._engine.lookup(prompt)
                if t != there: print("  then", t, "after", i, "ms"); there = t
                time.sleep(0.001)
            s = w._engine.stats(); print({k: v for k, v in s.items()})
            print([w._engine.lookup(p) for p in prompts(5)[:number+1]])
            pytest.fail("short")
    server.close()
