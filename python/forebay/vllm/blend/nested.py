"""Forward passes of vLLM's own model over chosen rows of a prompt, beside the server's steps and
memory.

vLLM's backends that write the KV of a step before they attend (`forward_includes_kv_cache_update`
is false) read K and V from paged memory alone. So a run of rows is a *virtual sequence*: its
queries are the run, its length is the run's end, its blocks are the prompt's. A pass over some runs
is exactly what a prefill does for these rows, given what the other rows' KV is.

Invariants:
- The model's layers see memory of this module's own while a pass runs, and the server's again when
  it is over, also after an error. A pass neither reads nor writes a block of the server; `copy_to`
  alone writes, whole blocks that its caller has been given.
- A pass runs in the worker's own thread, between two steps of the server or behind a step's forward
  pass; never inside that pass. On a GPU all of it, `write` and `copy_to` too, goes to the stream of
  the server's steps, which is that thread's: what comes before is read, what comes after waits.
- Passes over the same prompt go in ascending positions: a row attends to what the rows before it
  have when it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
#: Seconds that `finish` sleeps where the steps wait for a drive.
WAIT_S = 0.001
#: Work in pieces: yields how many rows it computes next, before it does; 0 where it waits for
#: something other than the processor.
Steps = Generator[int, None, T]
#: Called in each layer with the layer's number, the rows, and their queries, keys and values (keys
#: rotated), `[row, head, element]`. True ends the pass
#: before this layer's KV is written.
Seen = Callable[[int, "torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"], bool | None]


class _Enough(Exception):
    """Ends a pass early."""


def finish(steps: Steps[T]) -> T:
    """All of it at once; what it returns."""
    while True:
        try:
            if next(steps) == 0:
                time.sleep(WAIT_S)
        except StopIteration as over:
            return over.value  # type: ignore[no-any-return]


class Nested:
    """Passes over one prompt at a time."""

    def __init__(self, runner: Any) -> None:
        """For a runner that `refuse.runner` lets through."""
        self._model, self._config = runner.get_model(), runner.vllm_config
        #: Where the server's KV is, and all that passes compute.
        self.device: torch.device = runner.device
        #: Runs `(start, end)` of the pass that `seen` is called in.
        self.runs: list[tuple[int, int]] = []
        self._groups = [(group, self._builder(group)) for group in runner.attn_groups[0]]
        #: Layer names in the order in which they are computed; a layer's number is its index.
        self.names: list[str] = []
        context = self._config.compilation_config.static_forward_context
        for group, _ in self._groups:
            self.names.extend(group.layer_names)
        self.names.sort(key=list(context).index)
        self.layers = [context[name] for name in self.names]
        self.block = self._groups[0][1].kv_cache_spec.block_size
        self._most_rows = self._config.scheduler_config.max_num_batched_tokens
        self.scratch: list[torch.Tensor] = []
        self._tokens: torch.Tensor

    def _builder(self, group: Any) -> Any:
        # Never the runner's own: some keep buffers that a second build would overwrite. Nor one for
        # CUDA graphs: its buffers hold no more sequences than the server has, and here each run of
        # rows is one.
        of, config = group.get_metadata_builder(0), copy(self._config)
        config.compilation_config = copy(config.compilation_config)
        config.compilation_config.cudagraph_mode = type(config.compilation_config.cudagraph_mode).NONE
        return type(of)(of.kv_cache_spec, group.layer_names, config, self.device)

    def there(self, made: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor on the device of the server's KV; the host does not wait for it."""
        return made if self.device.type == "cpu" else made.pin_memory().to(self.device, non_blocking=True)

    def begin(self, tokens: list[int], blocks: int) -> None:
        """A new prompt; its memory has at least so many of the kernel's blocks. What was in it is
        not cleared."""
        import torch

        self._tokens = self.there(torch.tensor(tokens))
        if self.scratch and self.scratch[0].shape[0] >= blocks:
            return
        # What the last prompt had is free for this one; and a part of the layers is of no use.
        self.scratch, scratch = [], []
        for name, layer in zip(self.names, self.layers, strict=True):
            of = layer.kv_cache
            order = sorted(range(of.dim()), key=lambda axis: (-of.stride(axis), axis))
            if order[0] != 0 or of.stride(0) != of[0].numel():
                raise ValueError(f"{name}: blocks of shape {tuple(of.shape)} and strides {of.stride()} do not lie one after the other")
            stride = of.stride()
            # Zeros: rows behind a run are masked, and must be numbers.
            made = torch.zeros((blocks, *of.shape[1:]), dtype=of.dtype, device=self.device).flatten().as_strided((blocks, *of.shape[1:]), stride)
            scratch.append(made)
        self.scratch = scratch

    @contextmanager
    def _bound(self) -> Iterator[None]:
        servers = [layer.kv_cache for layer in self.layers]
        try:
            for layer, mine in zip(self.layers, self.scratch, strict=True):
                layer.kv_cache = mine
            yield
        finally:
            for layer, theirs in zip(self.layers, servers, strict=True):
                layer.kv_cache = theirs

    def write(self, number: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes rows of one layer by the backend's own writer, whatever its layout."""
        layer = self.layers[number]
        layer.impl.do_kv_cache_update(layer, keys.contiguous(), values.contiguous(), self.scratch[number], rows)

    def copy_to(self, blocks: list[int], first: int) -> None:
        """Copies the prompt's blocks from number `first` on into these blocks of the server, which
        count in the kernel's blocks."""
        import torch

        to = self.there(torch.tensor(blocks))
        for layer, mine in zip(self.layers, self.scratch, strict=True):
            layer.kv_cache[to] = mine[first : first + len(blocks)]

    def forward(self, rows: list[int], seen: Seen | None = None) -> torch.Tensor | None:
        """Computes these rows, ascending and each once, in all layers; their hidden states, or None
        where `seen` ended it."""
        return finish(self.steps(rows, seen))

    def steps(self, rows: list[int], seen: Seen | None = None) -> Steps[torch.Tensor | None]:
        """`forward` in pieces of as many rows as the server takes in one step."""
        import torch

        assert all(a < b for a, b in zip(rows, rows[1:])), "rows must ascend"
        parts = []
        for part in pieces(rows, self._most_rows):
            yield sum(end - start for start, end in part)
            parts.append(self._pass(part, seen))
        if any(part is None for part in parts):
            return None
        return torch.cat(parts) if parts else None  # type: ignore[arg-type]

    def _pass(self, runs: list[tuple[int, int]], seen: Seen | None) -> torch.Tensor | None:
        import torch

        self.runs = runs
        rows = self.there(torch.cat([torch.arange(start, end) for start, end in runs]))
        # One table for all: the prompt's blocks are those of the scratch memory in order, so that a
        # row's slot is the row.
        handles = ExitStack()
        with torch.inference_mode(), handles, self._bound(), self._context(rows, runs):
            if seen is not None:
                for number, layer in enumerate(self.layers):
                    hook = layer.register_forward_pre_hook(self._hook(number, rows, seen), with_kwargs=True)
                    handles.callback(hook.remove)
            try:
                return self._model(input_ids=self._tokens[rows], positions=rows, intermediate_tensors=None, inputs_embeds=None)
            except _Enough:
                return None

    @staticmethod
    def _hook(number: int, rows: torch.Tensor, seen: Seen) -> Callable[..., None]:
        def called(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            query, key, value = (*args, *(kwargs[name] for name in ("query", "key", "value")[len(args) :]))[:3]
            heads = query.view(-1, layer.num_heads, layer.head_size), key.view(-1, layer.num_kv_heads, layer.head_size)
            if seen(number, rows, *heads, value.view(-1, layer.num_kv_heads, layer.head_size)):
                raise _Enough

        return called

    def _context(self, rows: torch.Tensor, runs: list[tuple[int, int]]) -> Any:
        import torch
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        lengths = torch.tensor([end - start for start, end in runs], dtype=torch.int32)
        starts = torch.zeros(len(runs) + 1, dtype=torch.int32)
        starts[1:] = lengths.cumsum(0)
        ends = torch.tensor([end for _, end in runs], dtype=torch.int32)
        blocks = torch.arange(self.scratch[0].shape[0], dtype=torch.int32, device=self.device)
        common = CommonAttentionMetadata(
            query_start_loc=self.there(starts),
            query_start_loc_cpu=starts,
            seq_lens=self.there(ends),
            num_reqs=len(runs),
            num_actual_tokens=len(rows),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=blocks.expand(len(runs), -1).contiguous(),
            slot_mapping=rows,
            causal=True,
            seq_lens_cpu_upper_bound=ends,
            positions=rows,
            is_prefilling=torch.ones(len(runs), dtype=torch.bool),
        )
        of = {name: built for group, builder in self._groups for built in [builder.build(0, common)] for name in group.layer_names}
        return set_forward_context(of, self._config, num_tokens=len(rows), slot_mapping=dict.fromkeys(of, rows), skip_compiled=True)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of these hidden states."""
        return self._model.compute_logits(hidden)  # type: ignore[no-any-return]


def pieces(rows: list[int], most_rows: int) -> Iterator[list[tuple[int, int]]]:
    """Rows as runs `(start, end)` of neighbours, in lists of no more than so many rows."""
    runs: list[tuple[int, int]] = []
    count = 0
    for row in rows:
        goes_on = bool(runs) and runs[-1][1] == row
        if count == most_rows:
            yield runs
            runs, count, goes_on = [], 0, False
        if goes_on:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
        count += 1
    if runs:
        yield runs
