"""The engine's log lines go where vLLM's go."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from forebay.vllm import logs

pytestmark = pytest.mark.ci


@pytest.fixture
def forebay() -> Iterator[logging.Logger]:
    """The engine's logger as a program finds it that has not set it up; as it was afterwards."""
    logger = logging.getLogger("forebay")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(f"{record.levelname} {record.name} {record.getMessage()}")


def test_lines_of_the_engine_have_vllms_handlers_and_level(forebay: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, lines = logging.getLogger("vllm"), Lines()
    monkeypatch.setattr(theirs, "handlers", [lines])
    theirs.setLevel(logging.INFO)
    logs.join()
    logs.join()
    logging.getLogger("forebay.log").info("opened")
    logging.getLogger("forebay.log").debug("not wanted")
    assert lines.seen == ["INFO forebay.log opened"]


def test_a_program_that_has_set_it_up_keeps_it(forebay: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Lines()
    forebay.addHandler(own)
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [Lines()])
    logs.join()
    assert forebay.handlers == [own]
