"""Forebay under the names that LMCache's tests of its L2 adapters give to their mocks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import forebay.lmcache


class MockNativeConnector(forebay.lmcache.Connector):
    """A connector over an empty cache of its own, as those tests make theirs: without arguments."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forebay-lmcache-")
        super().__init__(cache_dir=self._folder.name, capacity="256MiB", min_free=0)

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Stores copies, as the mock does: some of those tests let go of a value at once, and
        LMCache's views of its memory do not keep it."""
        return super().submit_batch_set(keys, [memoryview(bytes(view)) for view in memoryviews])

    def close(self) -> None:
        """Also removes the cache; those tests close some connectors twice."""
        super().close()
        self._folder.cleanup()


class MockL2Adapter(forebay.lmcache.Adapter):
    """An adapter over an empty cache of its own. What the mock is configured with says nothing to it."""

    def __init__(self, _config: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forebay-lmcache-")
        super().__init__({"cache_dir": self._folder.name, "capacity": "256MiB", "min_free": 0})

    def close(self) -> None:
        """Also removes the cache."""
        super().close()
        self._folder.cleanup()
