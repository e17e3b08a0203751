"""What decides a key beside the token ids: each of vLLM's own request fields makes another key, or no key at all."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, MLAAttentionSpec
from vllm.v1.request import Request

from forebay.vllm import extra, geometry
from forebay.vllm.adapters import Adapters

pytestmark = pytest.mark.ci


def request(tokens: list[int] | None = None, **fields: Any) -> Request:
    return Request("r", [1, 2, 3] if tokens is None else tokens, SamplingParams(), None, **fields)


def key(adapters: Adapters | None = None, **fields: Any) -> Any:
    return extra.extra(request(**fields), adapters or Adapters())


def image(identifier: str, offset: int = 1, length: int = 2) -> list[MultiModalFeatureSpec]:
    return [MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))]


def adapter(folder: Path, weights: bytes, config: bytes = b"{}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_bytes(config)
    # Two writes within one tick of the clock are told apart here as they would be after minutes.
    adapter.ticks += 1
    for file in folder.iterdir():
        os.utime(file, (adapter.ticks, adapter.ticks))
    return folder


adapter.ticks = 0


def lora(folder: Path, name: str = "a", number: int = 1, **more: Any) -> LoRARequest:
    return LoRARequest(name, number, str(folder), **more)


def test_plain_text_has_no_extra_key() -> None:
    assert key() is None


def test_salts_images_and_adapters_are_keys_of_their_own(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "one", b"1" * 999), adapter(tmp_path / "two", b"2" * 999)
    keys = [
        None,
        key(cache_salt="a"),
        key(cache_salt="b"),
        key(mm_features=image("x")),
        key(mm_features=image("y")),
        key(mm_features=image("x", offset=0)),
        key(mm_features=image("x", length=1)),
        key(mm_features=image("x") + image("x")),
        key(lora_request=lora(one)),
        key(lora_request=lora(one, name="b")),
        key(lora_request=lora(two)),
        key(lora_request=lora(one, base_model_name="m")),
        key(lora_request=lora(one, is_3d_lora_weight=True)),
        key(lora_request=lora(one), cache_salt="a"),
    ]
    assert len({repr(k) for k in keys}) == len(keys)


def test_prompts_that_token_ids_do_not_identify_have_no_key() -> None:
    for fields in (
        {"prompt_embeds": torch.zeros(3, 4)},
        {"prompt_embeds": torch.zeros(3, 4), "prompt_is_token_ids": [True, False, True]},
        {"tokens": []},
    ):
        with pytest.raises(extra.NotCacheable):
            key(**fields)


def test_an_adapter_trained_again_in_its_place_is_another_one_after_a_restart(tmp_path: Path) -> None:
    old = key(lora_request=lora(adapter(tmp_path / "a", b"1" * 999)))
    assert key(lora_request=lora(adapter(tmp_path / "a", b"2" * 999))) != old
    assert key(lora_request=lora(adapter(tmp_path / "a", b"1" * 999, b'{"lora_alpha": 2}'))) != old
    assert key(lora_request=lora(adapter(tmp_path / "a", b"1" * 999))) == old


def test_an_adapter_that_changes_under_a_running_server_has_no_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapters = Adapters()
    old = key(adapters, lora_request=lora(adapter(tmp_path / "a", b"1" * 999)))
    adapter(tmp_path / "a", b"1" * 999)
    assert key(adapters, lora_request=lora(tmp_path / "a")) == old, "touched, and the same"
    adapter(tmp_path / "a", b"2" * 999)
    for _ in range(2):
        with pytest.raises(extra.NotCacheable):
            key(adapters, lora_request=lora(tmp_path / "a"))
    assert len([r for r in caplog.records if "have changed" in r.message]) == 1
    with pytest.raises(extra.NotCacheable):
        key(adapters, lora_request=lora(tmp_path / "gone"))
    assert len([r for r in caplog.records if "are not cached" in r.message]) == 2, "another reason is told too"
    anew = key(adapters, lora_request=lora(tmp_path / "a", load_inplace=True))
    assert anew["lora"]["digest"] != old["lora"]["digest"], "vLLM reads it at each use"
    adapter(tmp_path / "a", b"3" * 999)
    assert key(adapters, lora_request=lora(tmp_path / "a", load_inplace=True)) != anew


def test_an_adapter_that_changes_between_its_loading_and_its_first_request_has_no_key(tmp_path: Path) -> None:
    adapters, core = Adapters(), SimpleNamespace(model_executor=SimpleNamespace(add_lora=lambda _: True))
    for name in ("a", "b"):
        assert EngineCore.add_lora(core, lora(adapter(tmp_path / name, b"1" * 999), name, ord(name)))  # type: ignore[arg-type]
    adapter(tmp_path / "a", b"2" * 999)
    with pytest.raises(extra.NotCacheable):
        key(adapters, lora_request=lora(tmp_path / "a", "a", ord("a")))
    assert key(adapters, lora_request=lora(tmp_path / "b", "b", ord("b"))) is not None


def test_an_adapter_that_is_not_on_this_machine_has_no_key(tmp_path: Path) -> None:
    for path in (tmp_path / "none", "nobody/has-this-adapter"):
        with pytest.raises(extra.NotCacheable):
            key(lora_request=lora(path))


def test_a_request_skips_storing_or_loading_by_our_name_and_by_lmcaches() -> None:
    def skips(asked: dict[str, Any] | None, reads: bool = True) -> tuple[bool, bool]:
        sampling = SamplingParams(skip_reading_prefix_cache=not reads, extra_args=asked and {"kv_transfer_params": asked})
        return extra.skips(Request("r", [1, 2, 3], sampling, None))

    for name in ("forebay.skip_save", "lmcache.skip_save"):
        assert skips({name: True}) == (True, False)
        assert skips({name: True}, reads=False) == (True, True)
        assert skips({name: False}) == (False, False)
    for name in ("forebay.skip_load", "lmcache.skip_load"):
        assert skips({name: True}) == (False, True)
        assert skips({name: False}) == (False, False)
    assert skips(None) == skips({}) == skips({"skip_save": True, "skip_load": True}) == (False, False)


def test_layers_without_token_blocks_are_refused_by_name() -> None:
    mamba = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))
    local = ChunkedLocalAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, attention_chunk_size=64)
    compressed = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, tokens_per_state=4)
    prefix_lm = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, non_causal=True)
    refused = ((mamba, "recurrent state"), (local, "ChunkedLocalAttentionSpec"), (compressed, "compressed KV"), (prefix_lm, "later tokens"))
    for spec, why in refused:
        with pytest.raises(geometry.Unsupported, match=f"model.layers.0.*{why}"):
            geometry._window("model.layers.0", spec)


def test_inputs_that_vllm_numbers_have_no_names() -> None:
    def numbers(gib: float | None, prefix_caching: bool) -> bool:
        media = None if gib is None else SimpleNamespace(mm_processor_cache_gb=gib)
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(multimodal_config=media),
            cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        )
        return extra.numbers_media(config)

    assert numbers(0, False)
    assert not (numbers(0, True) or numbers(4, False) or numbers(None, False))
