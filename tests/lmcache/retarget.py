"""Forebay's connector under the name that LMCache's tests of its native adapter give to theirs."""

from __future__ import annotations

import tempfile

import forebay.lmcache


class MockNativeConnector(forebay.lmcache.Connector):
    """A connector over an empty cache of its own, as those tests make theirs: without arguments."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forebay-lmcache-")
        super().__init__(cache_dir=self._folder.name, capacity="256MiB")

    def close(self) -> None:
        """Also removes the cache; those tests close some connectors twice."""
        super().close()
        self._folder.cleanup()
