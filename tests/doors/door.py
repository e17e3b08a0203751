"""One server's way to a cache directory, in the environment of its stack: stores values and checks them, as standard input says.

Each line is a command, `store` or `check`, and each answer a line of JSON: how many values there are, how many were found, and how many of
those had every byte right. The end of the input closes the door.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
#: What every server says of the directory that they share.
SHARED = {"capacity": "1GiB", "min_free": 0}


class Door:
    """What the commands do."""

    count: int

    def store(self) -> dict[str, int]:
        raise NotImplementedError

    def check(self) -> dict[str, int]:
        raise NotImplementedError

    def answer(self, found: int, right: int) -> dict[str, int]:
        return {"values": self.count, "found": found, "right": right}


class Vllm(Door):
    """vLLM's scheduler and workers, two ranks, whose KV is checked token by token; values are tokens."""

    def __init__(self, cache: Path) -> None:
        from harness.server import CHUNK_TOKENS, Server, Shape

        self._tokens = CHUNK_TOKENS
        # What vLLM still has in its own blocks it would not ask Forebay for.
        shape = Shape(prefix_caching=False, settings=SHARED | {"gds_config": {"cache_dir": str(cache)}})
        # The model's path is part of its identity, and a server that starts again makes it anew.
        folder = cache.parent / "vllm"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._server = Server(shape, folder)
        self._prompts = [[first, *range(20, 20 + 5 * self._tokens)] for first in range(21, 29)]
        self.count = len(self._prompts) * 5 * self._tokens

    def _ask(self) -> int:
        before = self._server.loaded_tokens
        for number, prompt in enumerate(self._prompts):
            self._server.ask(f"{self._server.steps}-{number}", prompt, 4)
        self._server.drain()
        # The runner has compared all KV that was read with what it must be.
        self._server.check_outputs()
        return self._server.loaded_tokens - before

    def store(self) -> dict[str, int]:
        found = self._ask()
        for prompt in self._prompts:
            self._server.until_stored(prompt, 5 * self._tokens)
        return self.answer(found, found)

    def check(self) -> dict[str, int]:
        found = self._ask()
        return self.answer(found, found)

    def close(self) -> None:
        self._server.close()


class Lmcache(Door):
    """LMCache's L2 adapter, as its server makes and drives it."""

    count = 24

    def __init__(self, over: Any) -> None:
        import driving

        self._driving, self._over = driving, over
        self._values = {number: driving.memory(256 << 10, number) for number in range(self.count)}

    def store(self) -> dict[str, int]:
        stored = self._driving.store(self._over, self._values)
        return self.answer(self.count * stored, self.count * stored)

    def check(self) -> dict[str, int]:
        targets = {number: self._driving.memory(256 << 10, None) for number in self._values}
        found = self._driving.found(self._over, list(targets))
        loaded = self._driving.load(self._over, targets)
        right = [is_there and self._driving.same(targets[number], self._values[number]) for number, is_there in enumerate(loaded)]
        return self.answer(sum(found), sum(right))


class Sglang(Door):
    """SGLang's HiCache storage, as its factory makes it, over one of its host pools."""

    count = 12

    def __init__(self, over: Any, pool: Any) -> None:
        import world

        self._world, self._over, self._pool = world, over, pool
        self._keys = world.names(self.count)

    def store(self) -> dict[str, int]:
        self._world.fill(self._pool, 1)
        stored = sum(self._over.batch_set_v1(self._keys, self._world.pages(self._pool, 0, self.count)))
        return self.answer(stored, stored)

    def check(self) -> dict[str, int]:
        self._world.fill(self._pool, 1)
        right = [self._world.content(self._pool, page) for page in range(self.count)]
        self._world.fill(self._pool, 2)
        found = self._over.batch_exists(self._keys)
        loaded = self._over.batch_get_v1(self._keys, self._world.pages(self._pool, 0, self.count))
        same = [is_there and self._world.content(self._pool, page) == right[page] for page, is_there in enumerate(loaded)]
        return self.answer(found, sum(same))


@contextlib.contextmanager
def opened(stack: str, cache: Path) -> Iterator[Door]:
    """This stack's door."""
    sys.path.insert(0, str(TESTS / stack))
    if stack == "vllm":
        vllm = Vllm(cache)
        try:
            yield vllm
        finally:
            vllm.close()
    elif stack == "lmcache":
        import driving

        params = SHARED | {"cache_dir": str(cache), "namespace": "kv-of-lmcache"}
        line = {"type": "plugin", "module_path": "forebay.lmcache", "class_name": "Adapter", "adapter_params": params}
        with driving.adapter(json.dumps(line)) as over:
            yield Lmcache(over)
    else:
        import world

        pool = world.mha()
        with world.backend(world.config(cache, more=SHARED | {"namespace": "kv-of-sglang"}), pool) as over:
            yield Sglang(over, pool)


def main() -> None:
    stack, cache = sys.argv[1], Path(sys.argv[2])
    # What the stacks print is not an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    with opened(stack, cache) as door:
        print("open", file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(getattr(door, line.strip())()), file=answers, flush=True)


if __name__ == "__main__":
    main()
