"""What is checked or set once when the connector starts, before a wrong answer is possible."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from forebay.vllm import frames, identity
from forebay.vllm.geometry import Shape, Unsupported
from forebay.vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

logger = logging.getLogger("vllm.forebay")


def failure_policy(vllm_config: VllmConfig, settings: Settings) -> None:
    """A failed load is a miss: vLLM recomputes, where its own default fails the request. That default stays for layer-wise loads,
    from which vLLM cannot recompute.

    vLLM's scheduler reads the policy after it has made its connector. Inside MultiConnector only a copy can be changed, so the
    outer configuration must say it.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    outer = _outer()
    if outer == "fail":
        raise Unsupported(
            "kv_load_failure_policy of MultiConnector is fail: a damaged cache file would fail requests; "
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    if transfer.kv_load_failure_policy == "recompute":
        return
    if settings.layerwise and outer is None:
        logger.warning("kv_load_failure_policy is fail: with use_layerwise a request whose KV cannot be loaded ends with an error")
        return
    logger.warning(
        "kv_load_failure_policy was %s, is now recompute: what cannot be loaded is computed", transfer.kv_load_failure_policy
    )
    transfer.kv_load_failure_policy = "recompute"


def sleep_mode(vllm_config: VllmConfig) -> None:
    """Refuses sleep mode, as vLLM 0.33 does itself. With its mode `keep` vLLM waits for no store of a request that runs."""
    if vllm_config.model_config.enable_sleep_mode:
        raise Unsupported(
            "sleep mode takes the KV tensors' memory away while stores may still read it; start without --enable-sleep-mode"
        )


def fixed_weights(vllm_config: VllmConfig) -> None:
    """Refuses a server that a trainer sends weights to. vLLM does not tell a connector when it does, and after new weights it may be
    told to keep its caches."""
    if vllm_config.weight_transfer_config is not None:
        raise Unsupported(
            "weight_transfer_config: a trainer exchanges the weights while the server runs, and KV of all of them would be stored under "
            "one identity; start without weight transfer, or without Forebay"
        )


def known_weights(vllm_config: VllmConfig, fingerprint: str) -> None:
    """Refuses weights that nobody can tell from others that were loaded in the same way before."""
    if not fingerprint and not identity.are_weights_known(vllm_config):
        raise Unsupported(
            "vLLM does not say which weights it loads (from an object store, another process, or a hub that does not answer): after a "
            "change of them, KV of the old ones would be loaded; set `fingerprint` to a name for these weights, or load them from a "
            "local directory"
        )


def pooling(vllm_config: VllmConfig) -> None:
    """Refuses a pooling model that vLLM computes from the first token on: a loaded prefix would end the engine."""
    model = vllm_config.model_config
    if model.pooler_config is not None and not model.is_prefix_caching_supported:
        raise Unsupported(
            "a pooling model for which vLLM caches no prefixes (MEAN, CLS or STEP pooling, attention that is not causal): it ends where "
            "one was loaded; start without Forebay"
        )


def routed_experts(vllm_config: VllmConfig) -> None:
    """Refuses a server that returns the experts of every token, where vLLM does not stop a connector from loading tokens of which it
    has none."""
    if not vllm_config.aux_output_config.enabled:
        return
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

    if not hasattr(AuxOutputSchedulerConnector, "cap_external_hit"):
        raise Unsupported(
            "--enable-return-routed-experts: this vLLM ends when it is asked for the experts of tokens that a connector has loaded; "
            "use vLLM 0.33, or start without it"
        )


#: Connectors that load within a step and say only at its end what has failed: by then stores of what
#: they should have loaded have begun.
LOAD_WITHIN_A_STEP = ("LMCacheConnectorV1", "FlexKVConnector")
#: What the configuration of a model with sparse attention has. Its layers do not call vLLM's hooks, at
#: which a layer-wise load is waited for; nor do its indexers, which have a KV cache of their own.
SPARSE = ("index_topk", "sparse_attention_config")


def siblings() -> None:
    """Refuses connectors beside which wrong KV could be stored."""
    multi = _multi()
    children = [] if multi is None else multi.kv_connector_extra_config.get("connectors", [])
    for name in (child.get("kv_connector") for child in children):
        # Also LMCache's own class, LMCacheConnectorV1Dynamic.
        if str(name).startswith(LOAD_WITHIN_A_STEP):
            raise Unsupported(
                f"MultiConnector with {name} beside ForebayConnector: where a load of {name} fails, vLLM says so only when Forebay has "
                "begun to store what it should have brought; use one of them (LMCache can keep its values in Forebay: docs/lmcache.md)"
            )


def _multi() -> KVTransferConfig | None:
    """The configuration of the outermost MultiConnector around this connector, where there is one.

    vLLM's current configuration is set in workers alone, and they and the scheduler must decide alike.
    """
    transfers = [config.kv_transfer_config for config in frames.configs()]
    return next((found for found in reversed(transfers) if found and found.kv_connector == "MultiConnector"), None)


def _outer() -> str | None:
    multi = _multi()
    return None if multi is None else multi.kv_load_failure_policy


def blending(vllm_config: VllmConfig, settings: Settings) -> None:
    """Refuses a server that is to blend requests and cannot."""
    if settings.blends:
        from forebay.vllm.blend import refuse

        refuse.live(vllm_config, settings.layerwise, is_child=_multi() is not None)


def layerwise(vllm_config: VllmConfig, kv: Shape, settings: Settings) -> Settings:
    """The settings: layer-wise loads are refused where a failed one could do harm, or with `auto` left off."""
    if not settings.layerwise or (why := _unsound(vllm_config, kv, settings)) is None:
        return settings
    if not settings.is_auto:
        raise Unsupported(f"use_layerwise with {why}, or leave use_layerwise off")
    logger.info("use_layerwise: auto is off with %s", why)
    return settings.whole()


def _unsound(vllm_config: VllmConfig, kv: Shape, settings: Settings) -> str | None:
    """What keeps vLLM from a right end after a failed layer-wise load, and the remedy."""
    # What was seen of these two under either policy: docs/lab/vllm.md.
    if kv.ranks.pp > 1:
        return (
            "pipeline parallelism: the next steps may be under way before vLLM knows of a failed load, and no real vLLM with "
            "stages has shown that it ends the request in time; start with --pipeline-parallel-size 1"
        )
    if len(kv.block_tokens) > 1:
        return (
            "several KV cache groups: a load that fails within a step cannot be reported to vLLM; start with "
            "--disable-hybrid-kv-cache-manager"
        )
    model = getattr(vllm_config.model_config, "hf_text_config", None)
    if any(getattr(model, name, None) is not None for name in SPARSE):
        return "sparse attention: vLLM does not wait for the layers of this model; set use_layerwise: false"
    if vllm_config.parallel_config.use_ubatching:
        return "microbatches: vLLM says that a layer is computed when its first half is; start without --enable-dbo and --ubatch-size"
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    outer = _outer()
    is_fail = outer is None and transfer.kv_load_failure_policy == "fail"
    # With `auto` whatever the policy says: a worker in the scheduler's process shares its
    # configuration, comes first, and has changed the policy by then.
    if settings.resolved["mode"] == "ro" and (settings.is_auto or is_fail):
        return "mode: ro: a damaged chunk stays, and with kv_load_failure_policy: fail ends every request that needs it; set mode: rw"
    if is_fail:
        return None
    fails = 'set "kv_load_failure_policy": "fail"' if outer is None else "use ForebayConnector without MultiConnector"
    if any(window is not None for window in kv.windows):
        return (
            "a sliding window and kv_load_failure_policy: recompute: after a failed load vLLM goes back to tokens whose window it has "
            f"given away; {fails}, or set use_layerwise: false"
        )
    if vllm_config.scheduler_config.async_scheduling:
        return (
            "asynchronous scheduling and kv_load_failure_policy: recompute: after a failed load vLLM emits a token of the step in "
            f"flight and then waits forever for the last one; {fails}, start with --no-async-scheduling"
        )
    if vllm_config.cache_config.enable_prefix_caching:
        return (
            "prefix caching and kv_load_failure_policy: recompute: after a failed load vLLM lets other requests use its blocks "
            f"before they are computed anew; {fails}, start with --no-enable-prefix-caching"
        )
    return None
