"""Fixtures: a cache directory, LMCache's own adapter over it, and what LMCache's processes need."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}


#: The class of ours that LMCache makes for each of its two adapter types.
DOORS = {"plugin": "Adapter", "native_plugin": "Connector"}


def spec(cache: Path, door: str = "plugin", **settings: Any) -> str:
    """The JSON line that a user gives to `--l2-adapter`, as in docs/lmcache.md."""
    params = {"cache_dir": str(cache), "capacity": "1GiB", "min_free": 0, **settings}
    return json.dumps({"type": door, "module_path": "forebay.lmcache", "class_name": DOORS[door], "adapter_params": params})


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> str:
    """Each of the two types in turn."""
    return str(request.param)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """An empty directory for a cache."""
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"
