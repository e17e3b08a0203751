"""KV events: which blocks Forebay can serve, for other programs (routers), as vLLM's events with its block hashes.

A chunk is announced when every worker has committed it, or when a lookup finds it stored by an earlier run or another process.
It is taken back when a worker of this server has evicted it, or when a lookup misses it: other
processes on the same drives evict too, and this server gets no report of that.

It is announced once more, as one in remote storage, when every worker has uploaded it, and stays announced there when it leaves the
drives. That is taken back when this server removes it, or when a fetch does not find it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_STORAGE, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

#: The drives of the server's machine, or an object store: routers use blocks in storage only where
#: events say which. vLLM's own object tier tells them apart in the same way, by locality and not by
#: medium.
LOCAL, REMOTE = "LOCAL", "REMOTE"
#: A chunk of a request, as the state machine reports it: request, key, first token, tokens.
Chunk = tuple[str, bytes, int, int]
#: What the state machine's `take_events` returns.
ChunkEvents = tuple[list[Chunk], list[bytes], list[Chunk], list[Chunk], list[Chunk], list[bytes], list[tuple[bytes, bool]]]
#: Stores under way that are remembered at most; the state machine forgets older ones too.
MAX_ORDERED = 4096
#: Announced chunks whose hashes are kept, about a kilobyte each, to take them back when they are
#: evicted. An older one is taken back when a lookup misses it: that request has the hashes.
MAX_ANNOUNCED = 16384


@dataclass(frozen=True)
class Group:
    """One KV cache group."""

    index: int
    block_tokens: int
    kind: str
    window: int | None


@dataclass(frozen=True)
class Stored:
    """The event of a chunk in one group, kept small until the chunk is committed."""

    group: Group
    hashes: list[Any]
    parent: Any
    tokens: array[int]
    lora: tuple[int | None, str | None]
    extra_keys: list[tuple[Any, ...] | None] | None
    session: str | None

    def event(self, locality: str) -> BlockStored:
        """The event."""
        more = {} if self.session is None else {"session_id": self.session}
        return BlockStored(
            block_hashes=self.hashes,
            parent_block_hash=self.parent,
            token_ids=self.tokens.tolist(),
            block_size=self.group.block_tokens,
            lora_id=self.lora[0],
            medium=MEDIUM_STORAGE,
            lora_name=self.lora[1],
            extra_keys=self.extra_keys,
            group_idx=self.group.index,
            kv_cache_spec_kind=self.group.kind,
            kv_cache_spec_sliding_window=self.group.window,
            locality=locality,
            **more,
        )


class Announcer:
    """Turns the state machine's events into vLLM's, until vLLM takes them."""

    def __init__(self, kv_cache_config: KVCacheConfig, block_tokens: tuple[int, ...], has_remote: bool = False) -> None:
        """For KV cache groups with blocks of so many tokens. Nothing is announced before `bind`."""
        self._has_remote = has_remote
        self._groups = [
            Group(
                index,
                tokens,
                get_kv_cache_spec_kind(group.kv_cache_spec).value,
                get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for index, (group, tokens) in enumerate(zip(kv_cache_config.kv_cache_groups, block_tokens))
        ]
        self._hash_tokens = 0
        self._ordered: OrderedDict[bytes, list[Stored]] = OrderedDict()
        self._announced: OrderedDict[bytes, list[tuple[int, list[Any]]]] = OrderedDict()
        # Announced chunks that may still be uploaded, and those announced as uploaded.
        self._uploading: OrderedDict[bytes, list[Stored]] = OrderedDict()
        self._uploaded: OrderedDict[bytes, list[tuple[int, list[Any]]]] = OrderedDict()
        self._events: list[KVCacheEvent] = []

    def bind(self, hash_tokens: int) -> None:
        """vLLM hashes so many tokens at a time."""
        self._hash_tokens = hash_tokens

    def publish(
        self,
        requests: dict[str, Request],
        chunk_events: ChunkEvents,
    ) -> list[tuple[bytes, bool]]:
        """Turns the state machine's events into vLLM's; hashes of requests that have ended are no longer known.

        Returns the chunks that could not be taken back because their hashes are forgotten, and whether they were in remote storage.
        """
        ordered, stored, found, missing, missing_remote, evicted, remote = chunk_events
        forgotten = []
        for req_id, key, start, tokens in ordered:
            if (request := requests.get(req_id)) is not None:
                _remember(self._ordered, key, self._of(request, start, tokens), MAX_ORDERED)
        for key in stored:
            self._announce(key, self._ordered.pop(key, []))
        for req_id, key, start, tokens in found:
            self._ordered.pop(key, None)
            if (request := requests.get(req_id)) is not None:
                self._announce(key, self._of(request, start, tokens))
        for req_id, key, start, tokens in missing:
            self._announced.pop(key, None)
            if (request := requests.get(req_id)) is not None:
                self._take_back(((part.group.index, part.hashes) for part in self._of(request, start, tokens)), LOCAL)
        for req_id, _, start, tokens in missing_remote:
            if (request := requests.get(req_id)) is not None:
                self._take_back(((part.group.index, part.hashes) for part in self._of(request, start, tokens)), REMOTE)
        for key in evicted:
            if (parts := self._announced.pop(key, None)) is not None:
                self._take_back(parts, LOCAL)
            else:
                forgotten.append((key, False))
        for key, is_there in remote:
            if is_there:
                self._announce_remote(key, self._uploading.pop(key, []))
            elif (parts := self._uploaded.pop(key, None)) is not None:
                self._take_back(parts, REMOTE)
            else:
                forgotten.append((key, True))
        return forgotten

    def _announce(self, key: bytes, parts: list[Stored]) -> None:
        if not parts:
            return
        self._events.extend(part.event(LOCAL) for part in parts)
        _remember(self._announced, key, [(part.group.index, part.hashes) for part in parts], MAX_ANNOUNCED)
        if self._has_remote:
            _remember(self._uploading, key, parts, MAX_ORDERED)

    def _announce_remote(self, key: bytes, parts: list[Stored]) -> None:
        if not parts:
            return
        self._events.extend(part.event(REMOTE) for part in parts)
        _remember(self._uploaded, key, [(part.group.index, part.hashes) for part in parts], MAX_ANNOUNCED)

    def _take_back(self, parts: Iterable[tuple[int, list[Any]]], locality: str) -> None:
        self._events.extend(
            BlockRemoved(block_hashes=hashes, medium=MEDIUM_STORAGE, group_idx=group, locality=locality)
            for group, hashes in parts
        )

    def cleared(self) -> None:
        """Nothing that was announced is served any more."""
        self._ordered.clear()
        self._announced.clear()
        self._uploading.clear()
        self._uploaded.clear()
        self._events = [AllBlocksCleared()]

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _of(self, request: Request, start: int, tokens: int) -> list[Stored]:
        if not self._hash_tokens:
            return []
        return [part for group in self._groups if (part := self._part(request, group, start, tokens)) is not None]

    def _part(self, request: Request, group: Group, start: int, tokens: int) -> Stored | None:
        size = group.block_tokens
        hashes = resolve_block_hashes(request.block_hashes, self._hash_tokens, size)
        first, last = start // size, (start + tokens) // size
        if last > len(hashes) or first == last:
            return None
        lora = request.lora_request
        return Stored(
            group,
            [maybe_convert_block_hash(hashes[i]) for i in range(first, last)],
            maybe_convert_block_hash(hashes[first - 1]) if first else None,
            array("q", request.all_token_ids[start : last * size]),
            (lora.adapter_id, lora.name) if lora else (None, None),
            to_event_extra_keys(_extra_keys(request, (first, last), size)),
            getattr(request, "session_id", None),
        )


def _remember(among: OrderedDict[bytes, Any], key: bytes, value: Any, most: int) -> None:
    among[key] = value
    if len(among) > most:
        among.popitem(last=False)


def _extra_keys(request: Request, blocks: tuple[int, int], size: int) -> list[tuple[Any, ...] | None]:
    # 0: from the first multimodal input on, whichever lies in these blocks.
    return [generate_block_hash_extra_keys(request, at * size, (at + 1) * size, 0)[0] for at in range(*blocks)]
