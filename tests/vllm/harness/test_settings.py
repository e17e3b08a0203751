"""Where the connector's settings come from: one YAML file, the environment and vLLM's configuration mean the same keys."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forebay
import pytest
from forebay.connector import settings
from forebay.vllm import checks, identity
from forebay.vllm.connector import ForebayConnector
from forebay.vllm.geometry import Unsupported
from forebay.vllm.settings import read
from huggingface_hub import ResolvedRevision
from vllm.config import KVTransferConfig, PoolerConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from .server import Server, Shape, _kv, vllm_config

#: Copies and loads are not given up, however busy this machine is.
PATIENT = {"max_held_blocks": 1000, "gather_patience_ms": 20_000, "load_timeout_ms": 20_000}
PROMPT = [4 + i * 11 % 500 for i in range(300)]


def multi(config: VllmConfig, *children: dict[str, Any]) -> VllmConfig:
    """The configuration with these connectors in MultiConnector."""
    extra = {"connectors": list(children)}
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=extra
    )
    return config


def loaded(folder: Path, **extra: Any) -> int:
    """Tokens that a server of these settings loads of a prompt."""
    server = Server(Shape(settings=PATIENT | extra), folder)
    server.ask("a", PROMPT, 4)
    server.drain()
    server.check_outputs()
    found = server.loaded_tokens
    server.until_stored(PROMPT, 288)
    server.close()
    return found


def test_a_file_the_environment_and_code_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(tmp_path) == 0
    assert loaded(tmp_path) == 288
    file = tmp_path / "forebay.yaml"
    file.write_text("min_load_tokens: 1000\n")
    assert loaded(tmp_path, config_file=str(file)) == 0
    monkeypatch.setenv("FOREBAY_MIN_LOAD_TOKENS", "100")
    assert loaded(tmp_path, config_file=str(file)) == 288
    assert loaded(tmp_path, config_file=str(file), min_load_tokens=289) == 0


def test_a_file_that_is_named_takes_the_place_of_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, environments = tmp_path / "named.yaml", tmp_path / "environments.yaml"
    file.write_text(f"cache_dir: {tmp_path}/cache\nload_timeout_ms: 77\nmin_free: 30%\nwrite_budget_dwpd: 1\n")
    environments.write_text("fingerprint: theirs\ntenant_quota: 1GiB\nload_timeout_ms: 78\n")
    for others in (environments, Path("/nowhere/forebay.yaml")):
        monkeypatch.setenv("FOREBAY_CONFIG_FILE", str(others))
        # Without the capacity the file would be refused.
        found = read({"config_file": str(file), "max_held_blocks": 7, "capacity": "60%"})
        assert (found.fingerprint, found.resolved["load_timeout_ms"], found.resolved["max_held_blocks"]) == ("", 77, 7)
        assert settings(found.engine) == found.resolved, "so the engine reads the same"
    file.write_text("tenant_quota: 1GiB\nwrite_budget_dwpd: 1\nrecompute_tokens_per_s: 9\nmax_held_blocks: 7\n")
    none = {key: "none" for key in ("tenant_quota", "write_budget_dwpd", "recompute_tokens_per_s", "max_held_blocks")}
    found = read({"config_file": str(file), **none})
    assert {found.resolved[key] for key in none} <= {None, "none"}
    assert settings(found.engine) == found.resolved


def test_a_fingerprint_is_another_namespace_whoever_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(tmp_path, fingerprint="one") == 0
    assert loaded(tmp_path) == 0
    monkeypatch.setenv("FOREBAY_FINGERPRINT", "one")
    assert loaded(tmp_path) == 288


def test_another_model_that_drafts_is_another_namespace(tmp_path: Path) -> None:
    config = vllm_config(Shape(), tmp_path)
    names = ("model_config", "cache_config", "load_config", "device_config", "parallel_config", "attention_config")
    parts = {name: getattr(config, name) for name in names}

    def of(model: str | None, hf_config: Any = config.model_config.hf_config) -> str:
        like = {"revision": None, "quantization": None, "dtype": "bfloat16", "hf_config": hf_config}
        speculative = None if model is None else SimpleNamespace(draft_model_config=SimpleNamespace(model=model, **like))
        server: Any = SimpleNamespace(**parts, speculative_config=speculative)
        return identity.fingerprint(server, "")

    drafts = tmp_path / "drafts"
    drafts.mkdir()
    found = [of(None)]
    for weights in (b"1", b"2"):
        (drafts / "model.safetensors").write_bytes(weights * 100)
        found.append(of(str(drafts)))
    assert len(set(found)) == 3
    own = config.model_config.model
    assert of(own) == found[0], "its own files, as for n-grams"
    kept = [of(own, SimpleNamespace(to_dict=lambda at=at: {"eagle_aux_hidden_state_layer_ids": at})) for at in ([2, 18], [1, 2])]
    assert len({found[0], *kept}) == 3, "the layers whose hidden states are kept"


def test_what_else_the_kv_depends_on_is_another_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(Shape(), tmp_path)
    plain, others = config.model_config, ("cache_config", "load_config", "device_config", "parallel_config", "attention_config")
    names = ("model", "revision", "quantization", "dtype", "seed", "hf_config", "quantization_config", "multimodal_config")
    base = {name: getattr(plain, name) for name in (*names, "max_model_len", "original_max_model_len")}
    parts = {name: getattr(config, name) for name in others}

    def of(**changed: Any) -> str:
        server: Any = SimpleNamespace(**parts, model_config=SimpleNamespace(**base | changed))
        return identity.fingerprint(server, "")

    def media(**given: Any) -> dict[str, Any]:
        return {"multimodal_config": SimpleNamespace(**given)}

    def long(length: int, asked: int | None = None) -> dict[str, Any]:
        values = plain.hf_config.to_dict() | {"rope_parameters": {"rope_type": "longrope"}}
        return {"hf_config": SimpleNamespace(to_dict=lambda: values), "max_model_len": length, "original_max_model_len": asked}

    def at(commit: str | None) -> dict[str, Any]:
        return {"model": "some/model", "revision": None if commit is None else ResolvedRevision(commit * 40, None, "some/model")}

    # A text that is equal for all commits of a branch.
    assert at("a")["revision"] == at("b")["revision"] == "main"
    assert len({of(**at(commit)) for commit in ("a", "b", None)}) == 3

    assert of(max_model_len=77) == of(), "plain rotary positions are the same however long a request may be"
    found = [of(), of(quantization_config={"linear": "mxfp8"}), of(quantization_config={"linear": "mxfp4"})]
    found += [of(**media(mm_processor_kwargs=given)) for given in (None, {"do_normalize": False})]
    found += [of(**long(4096)), of(**long(8192)), of(**long(8192, -1))]
    assert len(set(found)) == len(found)
    assert of(**long(8000, -1)) == of(**long(8192, -1)), "what fits into memory is not the same at every start"
    assert of(**media(mm_processor_cache_gb=0)) == of(**media(mm_processor_cache_gb=4))
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True)
    with_amx = of()
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    assert with_amx != of(), "vLLM packs K and V for its tiles"
    server: Any = SimpleNamespace(**parts, model_config=plain)
    found = [identity.fingerprint(server, "", blocks) for blocks in (None, [(128, 128)], [(128, 64)], [(64, 64)])]
    for modules in (["o_proj"], ["q_proj", "o_proj"]):
        server.lora_config = SimpleNamespace(target_modules=modules)
        found.append(identity.fingerprint(server, ""))
    assert len(set(found)) == len(found)
    server.lora_config = SimpleNamespace(target_modules=None)
    assert identity.fingerprint(server, "") == found[0], "adapters are part of the keys"
    server.attention_config = SimpleNamespace(backend=None, backend_per_kind={"full_attention": "FLASHINFER"})
    assert identity.fingerprint(server, "") not in found


def test_weights_that_cannot_be_told_apart_want_a_fingerprint(tmp_path: Path) -> None:
    config = vllm_config(Shape(), tmp_path)
    local = config.model_config.model
    resolved = ResolvedRevision("a" * 40, None, "some/model")

    def known(model: str = local, revision: str | None = None, elsewhere: str = "", **load: Any) -> bool:
        loads = SimpleNamespace(**{"load_format": "auto", "download_dir": str(tmp_path), "model_loader_extra_config": {}} | load)
        like = SimpleNamespace(model=model, revision=revision, model_weights=elsewhere, hf_config=None)
        server: Any = SimpleNamespace(model_config=like, load_config=loads)
        try:
            checks.known_weights(server, "")
        except Unsupported:
            checks.known_weights(server, "mine")
            return False
        return True

    assert known() and known("some/model", resolved) and known("some/model", load_format="dummy")
    assert not known("some/model"), "the hub did not answer, and nothing of it is here"
    assert not known(elsewhere="s3://some/model")
    assert not known(load_format="ipc_cache")
    assert not known(load_format="tensorizer", model_loader_extra_config={"tensorizer_uri": "s3://some/model.tensors"})
    assert known(load_format="tensorizer", model_loader_extra_config={"tensorizer_config": {"tensorizer_dir": local}})


def test_a_projection_that_an_adapter_was_merged_into_is_other_weights(tmp_path: Path) -> None:
    file, projection = tmp_path / "model.safetensors", 896 * 896 * 2
    with file.open("wb") as weights:
        weights.truncate(1 << 30)
    before = identity.weights_digest(str(tmp_path))
    for place in range(0, 1 << 30, 99_999_989):
        with file.open("rb+") as weights:
            weights.seek(place)
            weights.write(b"\1" * projection)
            weights.flush()
            assert identity.weights_digest(str(tmp_path)) != before, f"the projection at {place}"
            weights.seek(place)
            weights.write(bytes(projection))
    assert identity.weights_digest(str(tmp_path)) == before


def test_of_a_loaders_configuration_counts_what_names_weights(tmp_path: Path) -> None:
    def of(**given: Any) -> str | None:
        return identity.loader_digest(given)

    assert of() is of(num_threads=4) is of(s3_secret_access_key="s", s3_access_key_id="k", stream_kwargs={"a": 1}) is None
    one = of(tensorizer_uri="s3://a", tensorizer_config={"tensorizer_uri": "s3://a", "s3_access_key_id": "k"})
    assert one == of(tensorizer_uri="s3://a", tensorizer_config={"tensorizer_uri": "s3://a"}) != of(tensorizer_uri="s3://b")
    assert one is not None and "s3" not in one
    # Tensors in a place of their own, whatever the model is.
    load = SimpleNamespace(load_format="tensorizer", model_loader_extra_config={"tensorizer_dir": str(tmp_path)})
    model = SimpleNamespace(model="some/model", revision=ResolvedRevision("a" * 40, None, "some/model"))
    assert identity.weights(model, load) is None
    (tmp_path / "model.tensors").write_bytes(b"one")
    found = identity.weights(model, load)
    (tmp_path / "model.tensors").write_bytes(b"two")
    assert None not in (found, identity.weights(model, load)) and found != identity.weights(model, load)


def test_a_configuration_of_another_repository_names_no_weights() -> None:
    config = SimpleNamespace(_commit_hash="a" * 40)
    for path, found in ((None, "a" * 40), ("some/model", "a" * 40), ("other/model", None)):
        model = SimpleNamespace(model="some/model", revision="main", hf_config=config, hf_config_path=path)
        assert identity.commit(model) == found


def test_the_engine_of_the_package_reads_the_same_keys(tmp_path: Path) -> None:
    file = tmp_path / "forebay.yaml"
    file.write_text(f"cache_dir: {tmp_path}/cache\nmax_held_blocks: 7\nfingerprint: mine\n")
    found = settings(file)
    assert (found["max_held_blocks"], found["fingerprint"], found["load_timeout_ms"]) == (7, "mine", 2000)
    assert settings({"config_file": str(file)}) == found
    geometry = forebay.Geometry(model="m", layers=1, kv_heads=1, head_size=8, dtype="float32", planes=2)
    for config in (file, {"config_file": str(file)}):
        with forebay.Engine(config, geometry, device="cpu") as engine:
            assert engine.is_up


def test_layers_are_loaded_one_by_one_wherever_that_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM asks the class before it makes a connector, to leave out CUDA graphs that skip the layers' hooks.
    assert not ForebayConnector.requires_piecewise_for_cudagraph({})
    assert ForebayConnector.requires_piecewise_for_cudagraph({"use_layerwise": "yes"})
    monkeypatch.setenv("FOREBAY_USE_LAYERWISE", "1")
    assert ForebayConnector.requires_piecewise_for_cudagraph({})


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"min_load_token": 1}, "did you mean min_load_tokens"),
        ({"recompute_tokens_per_s": "fast"}, "is not a number"),
        ({"config_file": "/nowhere/forebay.yaml"}, "config_file"),
    ],
    ids=["misspelt", "wrong", "no-file"],
)
def test_what_is_wrong_is_said_at_the_start(tmp_path: Path, extra: dict[str, Any], says: str) -> None:
    with pytest.raises(forebay.ForebayError, match=says):
        Server(Shape(settings=extra), tmp_path)


def test_what_became_of_a_request_is_one_line_at_debug_level(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm.forebay")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, "vllm.forebay"):
            loaded(tmp_path)
            loaded(tmp_path)
    finally:
        logger.removeHandler(caplog.handler)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("[req_id=a]")]
    first, second = dict.fromkeys(lines)
    assert "Retrieved 0 out of 300 prompt tokens" in first and "Stored 288 out of total 304 tokens, in chunks of 32" in first
    assert "Retrieved 288 out of 300 prompt tokens" in second


def half(request: Any, computed: int, tokens: int) -> int:
    """A user's function, by a name that the connector imports."""
    assert (request.num_prompt_tokens, computed, tokens) == (300, 0, 288)
    return 150


def fails(*_: Any) -> int:
    """Another one."""
    raise RuntimeError("out of order")


def test_a_function_of_the_users_own_lowers_what_is_loaded(tmp_path: Path) -> None:
    assert loaded(tmp_path) == 0
    assert loaded(tmp_path, load_limit="harness.test_settings:half") == 144, "whole blocks of 16"
    assert loaded(tmp_path, load_limit=lambda *_: 10_000) == 288, "no more than there is"
    assert loaded(tmp_path, load_limit=lambda *_: -1) == 0
    assert loaded(tmp_path, load_limit=fails) == 0, "and it is computed"
    for wrong in ("nowhere:half", "harness.test_settings:nothing", "harness.test_settings", 7):
        with pytest.raises(ValueError, match="write module:function"):
            Server(Shape(settings={"load_limit": wrong}), tmp_path)


def test_a_function_that_fails_is_told_once_and_not_in_every_step(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    loaded(tmp_path)
    server = Server(Shape(settings=PATIENT | {"load_limit": fails}), tmp_path)
    for name in "abc":
        server.ask(name, PROMPT, 4)
    server.drain()
    server.check_outputs()
    server.close()
    told = [record for record in log.records if record.levelname == "WARNING" and "load_limit failed" in record.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize("name", ["LMCacheConnectorV1", "LMCacheConnectorV1Dynamic", "FlexKVConnectorV1"])
def test_a_connector_whose_failed_loads_are_known_too_late_is_refused(name: str, tmp_path: Path) -> None:
    def siblings(other: str) -> None:
        # As in MultiConnector's constructor.
        config = multi(vllm_config(Shape(), tmp_path), {"kv_connector": other}, {"kv_connector": "ForebayConnector"})
        checks.siblings()
        del config

    siblings("NixlConnector")
    with pytest.raises(Unsupported, match=f"MultiConnector with {name} beside ForebayConnector"):
        siblings(name)


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each connector that was made has decided about layer-wise loads."""
    decided, decide = [], checks.layerwise

    def noted(*args: Any) -> Any:
        settings = decide(*args)
        decided.append(settings.layerwise)
        return settings

    monkeypatch.setattr(checks, "layerwise", noted)
    return decided


@pytest.mark.parametrize("asynchronous", [True, False])
def test_inside_multiconnector_scheduler_and_workers_decide_alike_about_layerwise_loads(
    tmp_path: Path, decided: list[bool], asynchronous: bool
) -> None:
    # vLLM sets its current configuration around the constructors of workers, and not around the scheduler's.
    shape = Shape(asynchronous=asynchronous, prefix_caching=False, settings={"use_layerwise": "auto"})
    config = vllm_config(shape, tmp_path)
    ours = config.kv_transfer_config
    assert ours is not None
    child = {name: getattr(ours, name) for name in ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config")}
    multi(config, child)
    KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, _kv(shape, 0)).shutdown()
    with set_current_vllm_config(config):
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, _kv(shape, 0)).shutdown()
    assert decided == [not asynchronous] * 2


@pytest.mark.parametrize("mode", ["ro", "rw"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_worker_that_shares_the_schedulers_configuration_decides_alike_about_layerwise_loads(
    tmp_path: Path, decided: list[bool], mode: str, prefix_caching: bool
) -> None:
    # As in vLLM's executor in one process, which makes the worker first.
    shape = Shape(policy="fail", prefix_caching=prefix_caching, settings={"use_layerwise": "auto", "mode": mode})
    config = vllm_config(shape, tmp_path)
    for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER):
        KVConnectorFactory.create_connector(config, role, _kv(shape, 0)).shutdown()
    assert decided == [mode == "rw"] * 2


def test_a_load_within_a_step_is_refused_by_a_worker_that_does_not_wait_for_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(tmp_path)
    decide, is_scheduler = checks.layerwise, iter([True])
    # As where the processes of one server were given other settings.
    monkeypatch.setattr(checks, "layerwise", lambda *args: decide(*args) if next(is_scheduler, False) else args[2].whole())
    within = {"use_layerwise": True}
    server = Server(Shape(asynchronous=False, prefix_caching=False, policy="recompute", settings=PATIENT | within), tmp_path)
    server.ask("a", PROMPT, 4)
    server.drain()
    # The runner ends the test where a step reads a block that nobody has filled.
    server.check_outputs()
    server.close()


@pytest.mark.parametrize("pools", ["MEAN", "LAST"])
def test_pooling_that_needs_every_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: str) -> None:
    config = vllm_config(Shape(), tmp_path)
    monkeypatch.setattr(config.model_config, "pooler_config", PoolerConfig(seq_pooling_type=pools, tok_pooling_type="ALL"))
    if pools == "LAST":
        checks.pooling(config)
        return
    with pytest.raises(Unsupported, match="MEAN"):
        checks.pooling(config)


def test_sleep_mode_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_config(Shape(), tmp_path).model_config, "enable_sleep_mode", True)
    with pytest.raises(ValueError, match="sleep mode"):
        Server(Shape(), tmp_path)


@pytest.mark.parametrize("numbered", [True, False])
def test_inputs_that_vllm_numbers_are_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbered: bool) -> None:
    shape = Shape(prefix_caching=not numbered)
    config = vllm_config(shape, tmp_path)
    monkeypatch.setattr(config.model_config, "multimodal_config", SimpleNamespace(mm_processor_cache_gb=0))
    connector = ForebayConnector(config, KVConnectorRole.SCHEDULER, _kv(shape, 0))
    image = MultiModalFeatureSpec(None, "image", "renderer0-mm-1-image-0", PlaceholderRange(1, 2))
    connector.on_new_request(Request("image", PROMPT, SamplingParams(), None, mm_features=[image]))
    connector.on_new_request(Request("text", PROMPT, SamplingParams(), None))
    side = connector._scheduler._side  # type: ignore[union-attr]
    assert (side.knows("image"), side.knows("text")) == (not numbered, True)
    connector.shutdown()


def test_a_server_that_gets_new_weights_is_refused(tmp_path: Path) -> None:
    config = vllm_config(Shape(), tmp_path)
    checks.fixed_weights(config)
    config.weight_transfer_config = SimpleNamespace()
    with pytest.raises(Unsupported, match="weight_transfer_config"):
        ForebayConnector(config, KVConnectorRole.SCHEDULER, _kv(Shape(), 0))


def test_experts_of_tokens_that_are_loaded_are_promised_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(Shape(), tmp_path)
    checks.routed_experts(config)
    config.aux_output_config = SimpleNamespace(enabled=True)
    monkeypatch.setattr(AuxOutputSchedulerConnector, "cap_external_hit", object(), raising=False)
    checks.routed_experts(config)
    monkeypatch.delattr(AuxOutputSchedulerConnector, "cap_external_hit")
    with pytest.raises(Unsupported, match="routed-experts"):
        ForebayConnector(config, KVConnectorRole.SCHEDULER, _kv(Shape(), 0))
