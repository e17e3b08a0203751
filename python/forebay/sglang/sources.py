"""SGLang's device pools as engines: which pools make one chunk, where its bytes lie, and what is in its identity.

SGLang names pages by hashes over the whole prefix, and says for each pool in GPU memory where a page's bytes of each layer lie. Pools
whose pages have the same numbers (the KV with its indexer and its draft) are kept together, as one chunk a page; windows and
recurrent state have pages of their own, and an engine of their own. A buffer of a pool is one layer of the engine, in the order in which
the model comes to it.

Invariants:
- Every buffer of every pool is in a chunk exactly once. What cannot be described is refused at the start.
- Two servers find each other's chunks only if a page of one is, byte for byte, a page of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import forebay
import torch
from forebay.sglang.identity import digest

#: Memory as the engine takes it: address, shape, strides, bytes of an element, device.
Blocks = tuple[int, tuple[int, int], tuple[int, int], int, str]


@dataclass(frozen=True)
class Source:
    """Pools whose pages have the same numbers, and the engine that keeps them."""

    name: str
    """What SGLang calls the pool that the numbers are of."""
    page_size: int
    """Indices of one page."""
    entries: tuple[Any, ...]
    """SGLang's views of the pools; they keep the memory alive."""
    engine: Any
    kv: Any
    last: dict[int, int]
    """For each layer of the model that has bytes here, the last of the engine's layers that it needs."""

    @staticmethod
    def open(name: str, entries: Sequence[Any], settings: dict[str, Any], layers: int, **geometry: Any) -> Source:
        """Opens the cache over these pools; raises what is wrong with pools or settings."""
        page_size = entries[0].page_size
        blocks: list[Blocks] = []
        last: dict[int, int] = {}
        device = _device(entries)
        for layer in range(layers):
            for entry in entries:
                found = _blocks_of(entry, layer, device)
                blocks.extend(found)
                if found:
                    last[layer] = len(blocks) - 1
        buffers = sum(len(component) for entry in entries for component in entry.components)
        if len(blocks) != buffers or len({block[0] for block in blocks}) != buffers:
            raise forebay.Unsupported(f"SGLang's pool {name} has {buffers} buffers, and names {len(blocks)} for its layers")
        specs = [{"kind": "opaque", "block_tokens": page_size, "block_bytes": block[1][1]} for block in blocks]
        described = [_described(entry) for entry in entries]
        shape = forebay.Geometry(dtype="uint8", layer_specs=specs, identity={"pools": digest([name, described])}, **geometry)
        engine = forebay.Engine(settings | {"chunk_size": page_size}, shape, device=device)
        return Source(name, page_size, tuple(entries), engine, engine.paged_kv(blocks), last)

    def prompt(self, keys: Sequence[str]) -> Any:
        """The prompt whose pages SGLang calls `keys`."""
        return self.engine.prompt_of_keys(list(keys))

    def find(self, keys: Sequence[str], pin_ms: int) -> tuple[int, Any]:
        """How many of the pages are stored, from the first on, and what keeps them from eviction while it lives."""
        found = self.engine.find(self.prompt(keys), pin_ms=pin_ms)
        return found.tokens // self.page_size, found

    def there(self, keys: Sequence[str]) -> list[bool]:
        """Which of the pages are stored."""
        return [self.engine.lookup(self.prompt([key])) == self.page_size for key in keys]

    def slots(self, indices: torch.Tensor, pages: int) -> list[int]:
        """The slots of so many pages, for the engine; raises where they are no whole pages, or not the same ones in all pools."""
        numbers = {
            tuple(row // _rows_of_a_page(entry) for row in entry.prepare_locations(entry.translate_indices(indices)))
            for entry in self.entries
        }
        if len(numbers) != 1 or len(found := numbers.pop()) != pages:
            raise ValueError(f"pool {self.name}: the indices of {pages} pages are not the same pages in all of its buffers")
        return [number * self.page_size + at for number in found for at in range(self.page_size)]


def sources(group: Any, settings: dict[str, Any], **geometry: Any) -> dict[str, Source]:
    """An engine for each of SGLang's pools that other pools follow."""
    model, made = geometry.pop("model"), {}
    try:
        for name in dict.fromkeys(group.sources.values()):
            followers = [entry for entry in group.entries if entry.indices_from_pool == name]
            made[name] = Source.open(str(name), followers, settings, group.num_layers, model=f"{model}/{name}", **geometry)
    except BaseException:
        for source in made.values():
            source.engine.close()
        raise
    return made


def _rows_of_a_page(entry: Any) -> int:
    buffer, size = entry.components[0][0], entry.buffer_meta[0][0][2]
    return size // (buffer.nbytes // buffer.shape[0])


def _device(entries: Sequence[Any]) -> str:
    found = {str(buffer.device) for entry in entries for component in entry.components for buffer in component}
    if len(found) != 1:
        raise forebay.Unsupported(f"SGLang's pools lie on several devices: {', '.join(sorted(found))}")
    return found.pop()


def _blocks_of(entry: Any, layer: int, device: str) -> list[Blocks]:
    mapped = entry.layer_mapping.get(layer)
    if mapped is None:
        return []
    found = []
    for component, described in zip(entry.components, entry.buffer_meta, strict=True):
        for index in [mapped] if isinstance(mapped, int) else mapped:
            buffer, (address, stride, size) = component[index], described[index]
            rows = size // (buffer.nbytes // buffer.shape[0])
            if not buffer[0].is_contiguous() or (rows > 1 and stride * rows != size):
                raise forebay.Unsupported(f"SGLang's pool {entry.name}: the bytes of a page of layer {layer} do not lie together")
            found.append((address, (buffer.shape[0] // rows, size), (stride * rows, 1), 1, device))
    return found


def _described(entry: Any) -> list[Any]:
    """What decides the meaning of a page's bytes, besides the model."""
    buffers = [[(str(buffer.dtype), list(buffer.shape[1:])) for buffer in component] for component in entry.components]
    mapping = sorted((layer, mapped if isinstance(mapped, int) else list(mapped)) for layer, mapped in entry.layer_mapping.items())
    return [str(entry.name), type(entry.device_pool).__name__, entry.page_size, buffers, mapping]
