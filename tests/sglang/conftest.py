"""Fixtures: an empty directory for a cache."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """An empty directory for a cache."""
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"
