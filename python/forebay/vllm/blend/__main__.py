"""Fills segments and writes blended prompts offline, for servers that know nothing of blending.

    python -m forebay.vllm.blend store segments.jsonl --model MODEL --cache-dir /mnt/nvme/forebay
    python -m forebay.vllm.blend blend prompts.jsonl --model MODEL --cache-dir /mnt/nvme/forebay

It starts a vLLM of its own. All lines are read before. Standard output has the report alone, what
vLLM prints goes to standard error. Exit status: 0; 1 where vLLM did not start or a line failed; 2
where arguments or a line make no sense.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from forebay._drives import drives
from forebay.vllm.blend import lines, refuse
from forebay.vllm.blend.client import Blend, BlendError
from forebay.vllm.settings import LOAD_LIMIT

NAME = "python -m forebay.vllm.blend"

_EPILOG = """\
Lines of `store`: {"segment": …, "anchor": …}. Lines of `blend`: {"anchor": …, "segments": […], "question": …}, each
of it a text or a list of token ids; or {"tokens": […], "segments": [[start, end], …]}; with either select, ratio,
check_layer, threshold and cache_salt as in docs/blend.md.

Options behind -- are those of `vllm serve`: give all that the server has which change its KV, such as --dtype.
docs/blend.md is the guide."""

Line = TypeVar("Line", lines.Segment, lines.Prompt)


def main(arguments: list[str] | None = None) -> int:
    """The program."""
    given = sys.argv[1:] if arguments is None else arguments
    split = given.index("--") if "--" in given else len(given)
    asked, options = _parser().parse_args(given[:split]), given[split + 1 :]
    try:
        read = lines.segments if asked.command == "store" else lines.prompts
        found = read(asked.file, _anchor(asked))
        settings = _settings(asked)
    except lines.Wrong as error:
        return _said(2, f"{asked.file}: {error}")
    except (OSError, ValueError) as error:
        return _said(2, str(error))
    report = _own_output()
    try:
        llm = _started(asked.model, settings, options)
        run = _Run(llm, found)
        return _store(run, report, asked.json) if asked.command == "store" else _blend(run, report)
    except BlendError as error:
        return _said(1, str(error))
    except KeyboardInterrupt:
        return _said(130, "interrupted; run it again, what is stored is not computed again")


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("file", type=Path, metavar="FILE", help="JSON lines")
    shared.add_argument("--model", required=True, help="the server's model, as `vllm serve` takes it")
    shared.add_argument("--cache-dir", required=True, metavar="DIR", help="the server's cache directory, or one for each drive, separated by commas")
    more = "another setting of the server's cache, such as chunk_size=512"
    shared.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=more)
    anchor = shared.add_mutually_exclusive_group()
    anchor.add_argument("--anchor", default="", metavar="TEXT", help="what segments are stored behind, where a line does not say it")
    anchor.add_argument("--anchor-file", type=Path, metavar="FILE", help="the same from a file, every byte of it")
    parser = argparse.ArgumentParser(
        prog=NAME, description=__doc__.split("\n\n")[0], epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="store|blend")
    look = {"parents": [shared], "epilog": _EPILOG, "formatter_class": argparse.RawDescriptionHelpFormatter}
    store = commands.add_parser("store", help="compute segments and store them, those that are there excepted", **look)
    store.add_argument("--json", action="store_true", help="the report as JSON")
    commands.add_parser("blend", help="blend prompts and store them; prints prompt and cache_salt of each as a JSON line", **look)
    return parser


def _anchor(asked: argparse.Namespace) -> str:
    # Line ends stay as they are in the file.
    return asked.anchor if asked.anchor_file is None else asked.anchor_file.read_bytes().decode()


def _settings(asked: argparse.Namespace) -> dict[str, str]:
    """What vLLM hands to the connector; `ValueError` where it makes no sense."""
    import forebay
    from forebay.connector import settings

    folders = drives(asked.cache_dir)
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no directory; name the server's cache directory, or make it on a local drive")
    given = {"cache_dir": ",".join(map(str, folders))}
    for item in asked.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--set {item}: write KEY=VALUE")
        given[key] = value
    try:
        settings({key: value for key, value in given.items() if key != LOAD_LIMIT}, name="--cache-dir and --set")
    except forebay.ForebayError as error:
        raise ValueError(str(error)) from error
    return given


def _own_output() -> IO[str]:
    """Standard output for the report alone: what this process and its children print from now on
    goes to standard error."""
    sys.stdout.flush()
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return report


def _started(model: str, settings: dict[str, str], options: list[str]) -> Any:
    """vLLM with these options; `BlendError` where it does not start."""
    try:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise BlendError(f"vLLM cannot be imported ({error}): use the Python that the server runs in, {sys.executable} is not it") from error
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=f"{NAME} … --"))
    parsed = parser.parse_args(["--model", model, *options])
    if parsed.kv_transfer_config is not None:
        parser.error("--kv-transfer-config: leave it out, and give the settings in it by --set")
    try:
        started = EngineArgs.from_cli_args(parsed)
        started.kv_transfer_config = KVTransferConfig(
            kv_connector="ForebayConnector", kv_role="kv_both", kv_connector_extra_config=settings
        )
        started.worker_extension_cls = refuse.EXTENSION
        return LLM.from_engine_args(started)
    except Exception as error:
        raise BlendError(f"vLLM did not start: {error}") from error


class _Run(Generic[Line]):
    """All lines one after the other. A line that fails is reported, and the others go on."""

    def __init__(self, llm: Any, found: list[Line]) -> None:
        self.lines, self.failed = found, 0
        # Opened before the first line: that a server cannot blend is reported once, not per line.
        self._llm, self._blend, self._anchor = llm, Blend(llm), []
        self._tokenizer = llm.get_tokenizer() if any(line.has_text() for line in found) else None
        self._began = self._shown = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since vLLM has started."""
        return time.monotonic() - self._began

    def each(self, done: Callable[[Line], str]) -> Iterator[tuple[int, str]]:
        """The lines that failed, by number, with the reason. `done` says how far it is."""
        for count, line in enumerate(self.lines, 1):
            said = ""
            try:
                said = done(line)
            except (BlendError, ValueError) as error:
                self.failed += 1
                print(f"{NAME}: line {line.number}: {error}", file=sys.stderr, flush=True)
                yield line.number, str(error)
            now = time.monotonic()
            if now - self._shown > 1 or count == len(self.lines):
                self._shown = now
                print(f"{count} of {len(self.lines)} lines in {self.seconds:.0f} s{said}", file=sys.stderr, flush=True)

    def encode(self, part: lines.Given) -> list[int]:
        """Its tokens."""
        return self._tokenizer.encode(part, add_special_tokens=False) if isinstance(part, str) else part  # type: ignore[union-attr]

    def behind(self, anchor: list[int]) -> Blend:
        """The `Blend` of this anchor."""
        if self._anchor != anchor:
            self._blend, self._anchor = Blend(self._llm, anchor), anchor
        return self._blend


def _store(run: _Run[lines.Segment], report: IO[str], as_json: bool) -> int:
    stored = there = computed = 0

    def done(line: lines.Segment) -> str:
        nonlocal stored, there, computed
        tokens = run.behind(run.encode(line.anchor)).store(run.encode(line.segment))
        stored, there, computed = stored + (tokens > 0), there + (tokens == 0), computed + tokens
        return f": {stored} stored, {there} there already"

    failures = [{"line": number, "error": why} for number, why in run.each(done)]
    if as_json:
        said = {"segments": len(run.lines), "stored": stored, "there": there, "failed": len(failures), "computed_tokens": computed}
        print(json.dumps(said | {"seconds": round(run.seconds, 3), "failures": failures}), file=report, flush=True)
    else:
        said = f"{len(run.lines)} segments: {stored} stored, {there} there already, {len(failures)} failed"
        print(f"{said}; {computed} tokens computed in {run.seconds:.1f} s", file=report, flush=True)
    return 1 if failures else 0


def _blend(run: _Run[lines.Prompt], report: IO[str]) -> int:
    def done(line: lines.Prompt) -> str:
        tokens, places, anchor = line.encoded(run.encode)
        made = run.behind(anchor).blend(tokens, places, **line.how)
        said = {
            "line": line.number,
            "prompt": made.tokens,
            "cache_salt": made.salt,
            "covered": made.covered,
            "segments": [{"start": one.start, "end": one.end, "state": one.state} for one in made.segments],
            "reused": made.reused,
            "recomputed": made.recomputed,
            "was_there": made.was_there,
        }
        print(json.dumps(said), file=report, flush=True)
        return ""

    for number, why in run.each(done):
        print(json.dumps({"line": number, "error": why}), file=report, flush=True)
    return 1 if run.failed else 0


def _said(status: int, why: str) -> int:
    print(f"{NAME}: {why}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
