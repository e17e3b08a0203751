"""What happens to a server, from a seed: requests with common beginnings in too small a pool of blocks, aborts, resets, damage,
restarts. Whatever happens, every request ends with the right tokens, none reads KV that is not right, and nothing is left behind.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from . import damage
from .kv import FIRST_TOKEN, VOCABULARY
from .server import Server, Shape

#: Longest prompt and output: together they fit into the smallest pool.
PROMPT_TOKENS, OUTPUT_TOKENS = 260, 40
SMALLEST_POOL = 26


@dataclass
class Tally:
    """What the runs met, so that tests can tell that it was met at all."""

    seeds: int = 0
    requests: int = 0
    aborted: int = 0
    resets: int = 0
    preemptions: int = 0
    damaged: int = 0
    loaded_tokens: int = 0
    seeds_that_loaded: int = 0
    failed_loads: int = 0
    seeds_that_failed: int = 0
    excused: int = 0
    errors: int = 0
    killed: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    def kind(self, name: str) -> None:
        """Counts a damage of this kind."""
        self.kinds[name] = self.kinds.get(name, 0) + 1

    def met_enough(self) -> None:
        """Without this every run could pass because nothing is ever loaded, and nothing ever fails."""
        print(self)
        if self.seeds < 18:
            pytest.skip("too few seeds in this run")
        assert self.seeds_that_loaded >= self.seeds * 0.3
        assert self.seeds_that_failed >= self.seeds * 0.1
        assert self.loaded_tokens >= 100 * self.seeds


def shape(source: random.Random, device: str) -> Shape:
    """A server's shape, drawn."""
    asynchronous = source.random() < 0.65
    settings: dict[str, Any] = {
        "save_decode_cache": source.random() < 0.5,
        "load_timeout_ms": source.choice((2000, 2000, 2000, 2000, 3)),
        "gather_patience_ms": source.choice((50, 50, 0)),
    }
    if source.random() < 0.2:
        settings["max_held_blocks"] = source.choice((0, 4))
    if source.random() < 0.2:
        settings["min_load_tokens"] = 64
    layerwise = not asynchronous and source.random() < 0.35
    if layerwise:
        settings["use_layerwise"] = True
    made = Shape(
        asynchronous=asynchronous,
        second_runner=source.random() < 0.5,
        ranks=source.choice((2, 2, 2, 3, 1)),
        blocks=source.choice((SMALLEST_POOL, 32, 48, 96)),
        max_requests=source.choice((2, 4, 8)),
        batch_tokens=source.choice((32, 64, 160, 512)),
        long_prefill_tokens=source.choice((0, 0, 24)),
        # The connector refuses `use_layerwise` with prefix caching.
        prefix_caching=not layerwise and source.random() < 0.8,
        role=source.choice(("kv_both",) * 8 + ("kv_producer", "kv_consumer")),
        device=device,
        settings=settings,
    )
    # From a source of its own: what the seeds draw else is what they drew before this setting was added.
    if random.Random(repr(made)).random() < 0.2:
        # Not the default: one in twenty of the blocks of these small pools holds no whole request.
        settings.update(store_when="finished", max_held_blocks=settings.get("max_held_blocks", 1000))
    # So few frames that prefetches of waiting requests have to wait for memory.
    if random.Random(f"memory {made!r}").random() < 0.4:
        settings.update(local_cpu=True, max_local_cpu_size="128KiB")
    return made


def with_windows(made: Shape, windows: tuple[int | None, ...]) -> Shape:
    """The same server with these KV cache groups, which take blocks for each request.

    With windows loads within a step are refused, but where vLLM ends a request whose load failed (`failing` comes later).
    """
    plain = windows == (None,)
    # Refused with windows: blocks that have left a window are gone when the request ends.
    settings = {name: value for name, value in made.settings.items() if plain or name not in ("use_layerwise", "store_when")}
    return dataclasses.replace(made, windows=windows, settings=settings, blocks=made.blocks * len(windows))


def with_ranks(made: Shape, ranks: dict[str, Any]) -> Shape:
    """The same server with these ranks; with pipeline stages loads within a step are refused, and vLLM's first runner runs no step ahead.

    With `failing` they are kept: who runs such servers lifts the refusal.
    """
    second = made.second_runner or (made.asynchronous and ranks.get("stages", 1) > 1)
    made = dataclasses.replace(made, second_runner=second, **ranks)
    is_kept = made.stages == 1 or made.policy == "fail"
    settings = {name: value for name, value in made.settings.items() if name != "use_layerwise" or is_kept}
    return dataclasses.replace(made, settings=settings)


def within_steps(made: Shape) -> Shape:
    """The same server that loads layer by layer within its steps, one step after the other; half of them store when a request ends."""
    # On a slow drive loads would run before their step, and none would fail within one.
    settings = made.settings | {"use_layerwise": True, "max_sync_stall_ms": 20_000}
    if random.Random(repr(made)).random() < 0.5:
        settings |= {"store_when": "finished", "max_held_blocks": 1000}
    return dataclasses.replace(made, asynchronous=False, prefix_caching=False, settings=settings)


def failing(made: Shape) -> Shape:
    """The same server as users start it: layer by layer within steps that are scheduled ahead, blocks of equal prefixes shared; a
    request whose load fails ends with an error."""
    source = random.Random(repr(made))
    settings = made.settings | {"use_layerwise": source.choice((True, "auto")), "max_sync_stall_ms": source.choice((20, 20_000))}
    ahead, caching = source.random() < 0.8, source.random() < 0.9
    return dataclasses.replace(made, asynchronous=ahead, prefix_caching=caching, policy="fail", settings=settings)


def patient(made: Shape) -> Shape:
    """The same server with time for a slow drive, but where it is to run out of it. Comes last: what was drawn before seeds other draws."""
    settings = dict(made.settings)
    for name, short, long in (("load_timeout_ms", 2000, 20_000), ("gather_patience_ms", 50, 5000)):
        if settings[name] == short:
            settings[name] = long
    return dataclasses.replace(made, settings=settings)


class Fuzz:
    """One run: servers one after the other on the same caches."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        tally: Tally,
        device: str = "cpu",
        windows: tuple[int | None, ...] = (None,),
        ranks: dict[str, Any] | None = None,
        change: Callable[[Shape], Shape] = lambda made: made,
    ) -> None:
        """Draws all from `seed`; caches lie in `folder`; `ranks`: fields of `Shape`; `change` is applied to each drawn shape."""
        self.source, self.folder, self.tally = random.Random(seed), folder, tally
        self.device, self.windows, self.ranks, self.change = device, windows, ranks or {}, change
        self.shape = with_ranks(self._drawn(), self.ranks)
        self.beginnings = [self._tokens(self.source.randrange(60, 230)) for _ in range(2)]
        self.prompts: list[list[int]] = []
        self.sent = 0

    def _drawn(self) -> Shape:
        return patient(self.change(with_windows(shape(self.source, self.device), self.windows)))

    def _tokens(self, count: int) -> list[int]:
        return [self.source.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]

    def _prompt(self) -> list[int]:
        if self.prompts and self.source.random() < 0.4:
            return list(self.source.choice(self.prompts))
        begin = self.source.choice(self.beginnings)
        begin = begin[: self.source.choice((len(begin), len(begin), self.source.randrange(1, len(begin))))]
        self.prompts.append((begin + self._tokens(self.source.choice((1, 5, 33, 64))))[:PROMPT_TOKENS])
        return list(self.prompts[-1])

    def _ask(self, server: Server) -> None:
        self.sent += 1
        self.tally.requests += 1
        stop = tuple(self._tokens(12)) if self.source.random() < 0.5 else ()
        params: dict[str, Any] = {}
        if self.source.random() < 0.1:
            name = self.source.choice(("forebay.skip_save", "lmcache.skip_load"))
            params = {"kv_transfer_params": {name: True}}
        prompt, count = self._prompt(), self.source.randrange(1, OUTPUT_TOKENS)
        server.ask(f"r{self.sent}", prompt, count, stop, **params)

    @staticmethod
    def _live(server: Server) -> list[str]:
        return [r for r, a in server.asked.items() if a.finished is None and not a.aborted]

    def _leaves(self, server: Server) -> None:
        """Perhaps a client goes away while a step runs."""
        if self.shape.policy == "fail" and self.source.random() < 0.02 and (live := self._live(server)):
            self.tally.aborted += 1
            server.abort(self.source.choice(live))

    def _happens(self, server: Server) -> None:
        """Perhaps something happens between two steps."""
        live = self._live(server)
        draw = self.source.random()
        if draw < 0.02 and live:
            self.tally.aborted += 1
            server.abort(self.source.choice(live))
        elif draw < 0.045:
            self.tally.resets += server.reset()
        elif draw < 0.05 and not server.is_loading:
            self.tally.resets += server.reset_running()
        elif draw < 0.055:
            self._damage(damage.RUNNING)

    def _damage(self, kinds: tuple[damage.Damage, ...]) -> None:
        kind, rank = self.source.choice(kinds), self.source.randrange(self.shape.workers)
        if kind(self.shape.cache(self.folder, rank), rank, self.source):
            self.tally.damaged += 1
            self.tally.kind(kind.__name__)

    def _life(self, is_last: bool) -> None:
        """A server from its start to its end, which comes too early for some."""
        server = Server(self.shape, self.folder)
        steps_until_killed = self.source.randrange(10, 80) if not is_last and self.source.random() < 0.2 else None
        left = self.source.randrange(4, 14)
        try:
            while left or server.scheduler.has_requests():
                if left and self.source.random() < 0.15:
                    burst = min(left, self.source.choice((1, 1, 2, 4)))
                    left -= burst
                    for _ in range(burst):
                        self._ask(server)
                server.step(before_update=lambda: self._leaves(server))
                self._happens(server)
                if steps_until_killed is not None and server.steps >= steps_until_killed:
                    self.tally.killed += 1
                    break
            else:
                server.drain()
                server.check_empty()
            server.check_outputs(all_finished=steps_until_killed is None)
        finally:
            self._count(server)
            server.close()

    def _count(self, server: Server) -> None:
        self.tally.loaded_tokens += server.loaded_tokens
        self.tally.failed_loads += server.failed_loads
        self.tally.preemptions += server.preemptions
        self.tally.excused += server.runner.excused
        self.tally.errors += server.errors

    def run(self) -> None:
        """Runs the servers, with damage between them."""
        before = (self.tally.loaded_tokens, self.tally.failed_loads)
        lives = self.source.choice((2, 2, 3))
        for life in range(lives):
            self._life(life == lives - 1)
            if self.source.random() < 0.5:
                self._damage(damage.STOPPED)
            if self.source.random() < 0.3:
                # The next server runs the model in another way; what it finds stored is the same.
                self.shape = with_ranks(dataclasses.replace(self._drawn(), ranks=self.shape.ranks), self.ranks)
        self.tally.seeds += 1
        self.tally.seeds_that_loaded += self.tally.loaded_tokens > before[0]
        self.tally.seeds_that_failed += self.tally.failed_loads > before[1]
