"""The external linker through SGLang's real tree, wrapper and factory: every byte compared, and what happens when layers do not come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from linked import PAGE, prompt, served

KINDS = [("dsa", False), ("dsa", True), ("hybrid", False), ("hybrid", True)]


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "drafts"), KINDS)
def test_a_prompt_is_loaded_layer_by_layer_after_a_restart(cache: Path, kind: str, drafts: bool) -> None:
    with served(cache, kind, drafts=drafts) as server:
        stored = server.compute(prompt(5), seed=1)
        assert server.settle() == [True]
    with served(cache, kind, drafts=drafts) as server:
        req = server.request([*prompt(5), *range(70_000, 70_100)])
        assert server.match(req) == 5 * PAGE
        assert server.admit(req) == 5 * PAGE
        failed = server.forward([req])
        assert failed == []
