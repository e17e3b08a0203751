"""Segments in a namespace of their own: each is the exact KV of *anchor, then segment*, at the
granularity of tokens.

Nothing approximate is stored here, and no context of a prompt: a segment's KV depends on the anchor
and the segment alone. A segment is loaded straight to its rows of a prompt, every extent's checksum
is verified, and its keys are turned to their new positions.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.forebay")

#: Rows of memory come in blocks of so many, which is all that the engine needs to know of it.
BLOCK = 16

#: Segments that are loaded at once. Loads side by side end at about the same time: with all of the
#: segments under way, no keys could be turned before the drive has finished.
AT_ONCE = 3


@dataclass(frozen=True)
class Dimensions:
    """The KV of one layer, alike in all."""

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def type_name(self) -> str:
        """Name of the element type."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Rotary:
    """How the server rotates the keys of some layers."""

    table: torch.Tensor
    """`[positions, rotary elements]`: cosines, then sines."""
    is_neox: bool
    layers: list[int]


class Rows:
    """K and V of the tokens of one prompt, row by row, where the server's KV is."""

    def __init__(self, of: Dimensions, tokens: int, device: torch.device) -> None:
        """Memory for at least so many tokens; what is in it means nothing before it is written."""
        import torch

        blocks = -(-max(tokens, 1) // BLOCK)
        shape = (2, blocks, BLOCK, of.heads, of.head_size)
        self.paged = [torch.empty(shape, dtype=of.dtype, device=device) for _ in range(of.layers)]
        self.device = device
        self._flat = [layer.view(2, blocks * BLOCK, of.heads, of.head_size) for layer in self.paged]

    def keys(self, layer: int) -> torch.Tensor:
        """`[row, head, element]`."""
        return self._flat[layer][0]

    def values(self, layer: int) -> torch.Tensor:
        """`[row, head, element]`."""
        return self._flat[layer][1]

    def put(self, layer: int, rows: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Writes K and V of these rows."""
        self._flat[layer][0][rows], self._flat[layer][1][rows] = kv


def stream(device: torch.device) -> int | None:
    """The handle of this thread's current CUDA stream; None on a CPU."""
    import torch

    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


@dataclass(frozen=True)
class Chain:
    """*Anchor, then segment*, hashed."""

    anchor: list[int]
    segment: list[int]
    prompt: Any

    @property
    def tokens(self) -> list[int]:
        """All of them."""
        return self.anchor + self.segment

    def __len__(self) -> int:
        """How many tokens."""
        return len(self.anchor) + len(self.segment)


class Segments:
    """The stored segments of one model. `anchor` are the tokens that a segment is stored behind."""

    def __init__(self, engine: Any, of: Dimensions, rotary: list[Rotary]) -> None:
        """`engine` was opened with a geometry of `geometry`."""
        self._engine, self._of, self._rotary = engine, of, rotary
        self._loader = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="forebay-segment")
        # Of its own: a store may wait long for a drive, and loads must not wait for it.
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="forebay-segment-store")

    @staticmethod
    def geometry(model: str, fingerprint: str, of: Dimensions, tp: tuple[int, int]) -> Any:
        """The geometry of segments: K and V as plain planes, in a namespace that no prompt's KV
        has. `tp` is the worker's rank and the number of workers: each has heads of its own."""
        import forebay

        return forebay.Geometry(
            model=model,
            layers=of.layers,
            kv_heads=of.heads,
            head_size=of.head_size,
            dtype=of.type_name,
            planes=2,
            fingerprint=fingerprint,
            identity={"kv": "segments"},
            tp=tp,
        )

    def chains(self, anchor: list[int], segments: list[list[int]]) -> list[Chain]:
        """The segments behind their anchor, which is hashed once for all of them."""
        base = self._engine.prompt(anchor)
        return [Chain(anchor, segment, base.extended(segment)) for segment in segments]

    def has(self, chain: Chain) -> bool:
        """Whether all of a segment is stored; false too where the lookup fails."""
        try:
            return bool(self._engine.lookup(chain.prompt) == len(chain))
        except Exception:
            logger.exception("a segment of %d tokens could not be looked up", len(chain.segment))
            return False

    def store(self, chain: Chain, rows: Rows) -> Future[str | None]:
        """Begins to store a segment from the rows of *anchor, then segment*, which stay as they are
        until it is over. The future says why it was not stored, None where it was. It raises
        nothing."""
        return self._saver.submit(self._store, chain, rows, stream(rows.device))

    def _store(self, chain: Chain, rows: Rows, after: int | None) -> str | None:
        try:
            # Without a time limit: each of its requests to the drive has one.
            result = self._engine.store(
                chain.prompt, rows.paged, list(range(len(chain))), stream=after, layout="PBTHD", save_unfull=True, wait_for_staging=True
            ).wait()
        except Exception as error:  # noqa: BLE001 - the cache is at fault, and the request is computed
            return f"{type(error).__name__}: {error}"
        return None if self.has(chain) else f"the cache took {result.stored} of its chunks: {result.sheds or 'see the log of forebay'}"

    def begin(self, chain: Chain, rows: Rows, start: int, with_anchor: bool, limit_ms: int | None) -> Future[bool]:
        """Begins to load a segment to the rows from `start` on, and its anchor to the first rows
        where that is wanted. The future says whether all of it arrived as it was stored; its keys
        are turned to their places then. It raises nothing. `limit_ms` counts from when the load
        gets one of the `AT_ONCE` threads."""
        # The caller's stream, not the loading thread's: earlier work in that stream may still use
        # the memory of the rows.
        return self._loader.submit(self._load, chain, rows, start, with_anchor, stream(rows.device), limit_ms)

    def _load(self, chain: Chain, rows: Rows, start: int, with_anchor: bool, after: int | None, limit_ms: int | None) -> bool:
        try:
            return self._loaded(chain, rows, start, with_anchor, after, limit_ms)
        except Exception:
            logger.exception("a segment of %d tokens could not be loaded", len(chain.segment))
            return False

    def _loaded(self, chain: Chain, rows: Rows, start: int, with_anchor: bool, after: int | None, limit_ms: int | None) -> bool:
        behind, end = len(chain.anchor), start + len(chain.segment)
        first = list(range(behind)) if with_anchor else [-1] * behind
        slots = first + list(range(start, end))
        load = self._engine.load(chain.prompt, rows.paged, slots, stream=after, timeout_ms=limit_ms, layout="PBTHD")
        if load.wait().tokens != len(chain):
            return False
        for rotary in self._rotary:
            self._engine.turn_keys(
                rows.paged,
                list(range(start, end)),
                list(range(behind, behind + end - start)),
                list(range(start, end)),
                rotary.table,
                dtype=self._of.type_name,
                neox=rotary.is_neox,
                layers=rotary.layers,
                layout="PBTHD",
            )
        return True

    def close(self) -> None:
        """Ends what is under way and closes the cache."""
        for threads in (self._loader, self._saver):
            threads.shutdown(cancel_futures=True)
        self._engine.close()
