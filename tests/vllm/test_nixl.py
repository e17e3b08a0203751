"""Prefill and decode in two servers: NIXL brings the KV from one to the other, and Forebay, beside it in MultiConnector, keeps it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, prompts, settings
from test_server import Server, Starting

#: 58 MB, fetched once. `nixl` alone finds no library.
NIXL = ("nixl==1.5.1", "nixl-cu13==1.5.1")
HITS, OURS = "vllm:external_prefix_cache_hits", "vllm:forebay_loaded_tokens"
CHUNK = 128


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL beside vLLM's packages, for the servers that are started."""
    place = HERE.parent.parent / "target" / "-".join(("nixl", *(pin.split("==")[1] for pin in NIXL)))
    if not (place / "ready").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--upgrade", "--target", place, *NIXL]
        subprocess.run(command, check=True)
        (place / "ready").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))


def starting(folder: Path, model: str, cache: Path, port: int) -> Starting:
    """A server that can prefill and decode, as docs/vllm.md starts it."""
    children = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
        {"kv_connector": "ForebayConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings(cache)},
    ]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        return Starting(folder, model, None, ("--max-model-len", "2048", "--kv-transfer-config", json.dumps(transfer)))


def ask(of: Server, prompt: list[int], count: int = 8, **more: Any) -> dict[str, Any]:
    """A completion of `count` tokens."""
    asked = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | more
    request = urllib.request.Request(of.base + "/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def decoded(prefill: Server, decode: Server, prompt: list[int]) -> list[int]:
    """Tokens as a router gets them: one server computes the prompt, the other the answer."""
    first = ask(prefill, prompt, 1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
    return ask(decode, prompt, kv_transfer_params=first["kv_transfer_params"])["choices"][0]["token_ids"]


@pytest.mark.usefixtures("nixl")
def test_prefill_and_decode_over_nixl_with_forebay_beside_it(model: str, tmp_path: Path) -> None:
    asked = prompts(2, shared=0, own=430)
    caches = [tmp_path / "prefill", tmp_path / "decode"]
    both = [starting(tmp_path, model, cache, 15600 + number) for number, cache in enumerate(caches)]
    try:
        prefill, decode = (one.up() for one in both)
        expected = []
        for prompt in asked:
            before = decode.metric(HITS)
            tokens = decoded(prefill, decode, prompt)
            # All of it came from the other server, and both have stored it.
            assert decode.metric(HITS) - before == len(prompt) and decode.metric(OURS) == 0
            expected.append(tokens)
        assert [ask(prefill, prompt)["choices"][0]["token_ids"] for prompt in asked] == expected
    finally:
        for one in both:
            one.stop()
    # A server that has never seen the prompts loads them from what the decode server has stored.
    again = starting(tmp_path, model, caches[1], 15602)
    try:
        server = again.up()
        assert [ask(server, prompt)["choices"][0]["token_ids"] for prompt in asked] == expected
        assert server.metric(OURS) >= sum(len(prompt) // CHUNK * CHUNK for prompt in asked)
    finally:
        again.stop()
