"""Lifts what refuses layer-wise loads at a server's start, for tests of what would happen there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.vllm import checks

if TYPE_CHECKING:
    import pytest


def lift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers start with layer-wise loads, whatever speaks against them."""
    monkeypatch.setattr(checks, "_unsound", lambda *_: None)
