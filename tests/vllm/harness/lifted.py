"""Lifts what refuses layer-wise loads at a server's start, for tests of what would happen there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.vllm import checks
from forebay.vllm.scheduling import SchedulerHalf
from forebay.vllm.working import WorkerHalf

from .rejecting import NULL_BLOCK

if TYPE_CHECKING:
    import pytest
    from vllm.v1.request import Request


def lift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers start with layer-wise loads, whatever speaks against them."""
    monkeypatch.setattr(checks, "_unsound", lambda *_: None)


class _Naming:
    """A worker's side that also names the blocks of loads within steps that failed as a whole."""

    def __init__(self, side: Any, loads: dict[str, set[int]]) -> None:
        self._side, self._loads, self._failed = side, loads, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._side, name)

    def failed_requests(self) -> list[str]:
        self._failed = self._side.failed_requests()
        return self._failed

    def get_block_ids_with_load_errors(self) -> set[int]:
        named = set(self._side.get_block_ids_with_load_errors())
        return named.union(*(self._loads.get(req_id, ()) for req_id in self._failed))


def name_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the workers of a server with a sliding window name the blocks of a load that fails within a step. Forebay's name its request,
    of which vLLM takes no notice."""
    loads: dict[str, set[int]] = {}
    given, register = SchedulerHalf.update_state_after_alloc, WorkerHalf.register_kv_caches

    def noted(self: SchedulerHalf, request: Request, block_ids: tuple[list[int], ...], external: int) -> None:
        given(self, request, block_ids, external)
        req_id, computed, is_within_step = self._answer
        if external <= 0:
            return
        loads.pop(request.request_id, None)
        if is_within_step and req_id == request.request_id:
            first, stop = computed // self._multiple, -(-(computed + external) // self._multiple)
            loads[req_id] = {block for table in block_ids for block in table[first:stop]} - {NULL_BLOCK}

    def registered(self: WorkerHalf, kv_caches: dict[str, Any]) -> None:
        register(self, kv_caches)
        self._side = _Naming(self._side, loads)

    monkeypatch.setattr(SchedulerHalf, "update_state_after_alloc", noted)
    monkeypatch.setattr(WorkerHalf, "register_kv_caches", registered)
