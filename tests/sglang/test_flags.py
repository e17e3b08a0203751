"""The flags that `python -m forebay.sglang` prints are SGLang's own, and say what was asked."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from forebay.sglang.__main__ import main
from sglang.srt.server_args import ServerArgs


def parsed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What SGLang's own parser makes of the flags."""
    assert main(list(arguments)) == 0
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(["--model-path", "m", *shlex.split(capsys.readouterr().out)])


@pytest.mark.ci
def test_sglang_understands_the_flags(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--cache-dir", str(cache), "--capacity", "2GiB", "--set", "namespace=a b")
    given = {"cache_dir": str(cache), "capacity": "2GiB", "namespace": "a b"}
    args = parsed(capsys, *where)
    assert args.enable_hierarchical_cache and args.hicache_storage_backend == "dynamic" and args.page_size == 64
    assert given.items() <= json.loads(args.hicache_storage_backend_extra_config).items()
    args = parsed(capsys, "--linker", "--page-size", "32", *where)
    assert args.page_size == 32
    assert args.enable_unified_cache_external_linker and args.unified_cache_external_linker_backend == "dynamic"
    config = args.unified_cache_external_linker_config
    config = json.loads(config) if isinstance(config, str) else config
    assert config == {"linker": "Linker", "linker_module_path": "forebay.sglang", "linker_extra_config": given}


@pytest.mark.ci
def test_keys_that_are_sglangs_own_go_to_it_as_numbers(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threshold = ("--set", "prefetch_threshold=64")
    args = parsed(capsys, "--cache-dir", str(cache), *threshold)
    assert json.loads(args.hicache_storage_backend_extra_config)["prefetch_threshold"] == 64
    assert main(["--linker", "--cache-dir", str(cache), *threshold]) == 1
    assert "prefetch_threshold" in capsys.readouterr().err


@pytest.mark.ci
def test_settings_that_are_wrong_are_named(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cache-dir", str(cache), "--set", "no_such_setting=1"]) == 1
    assert "no_such_setting" in capsys.readouterr().err
    for item in ("chunk_size=64", "mode=ro"):
        with pytest.raises(SystemExit):
            main(["--linker", "--cache-dir", str(cache), "--set", item])
        assert item.partition("=")[0] in capsys.readouterr().err
    for item in ("interface_v1=off", "cache_dir=elsewhere", "drives=elsewhere"):
        with pytest.raises(SystemExit):
            main(["--cache-dir", str(cache), "--set", item])
        assert item.partition("=")[0] in capsys.readouterr().err
    assert main(["--cache-dir", str(cache / "missing" / "drive")]) == 1
    assert "is no directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--cache-dir", f"{cache},"])
    assert "has a name missing" in capsys.readouterr().err


@pytest.mark.ci
def test_the_server_makes_a_directory_that_is_missing(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for where in (str(cache / "missing"), f"{cache}/a,{cache}/b"):
        assert main(["--cache-dir", where]) == 0
        assert where in capsys.readouterr().out
    # The server may start in another directory.
    monkeypatch.chdir(cache.parent)
    assert main(["--cache-dir", "a, b"]) == 0
    assert f"{cache.parent}/a,{cache.parent}/b" in capsys.readouterr().out
