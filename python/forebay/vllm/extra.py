"""What, besides its token ids, decides a request's KV: multimodal inputs, LoRA, cache salt.

Two requests with the same tokens but another one of these must never share a key. Prompt embeddings have no token ids to
hash: such requests are never cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from forebay.vllm.adapters import Adapters

#: By our name and by LMCache's.
SKIP_SAVE = ("forebay.skip_save", "lmcache.skip_save")
SKIP_LOAD = ("forebay.skip_load", "lmcache.skip_load")
#: What a producer answers and a consumer is asked with: tokens from the start whose KV the producer
#: stores.
TRANSFERRED = "num_transferred_tokens"


class NotCacheable(Exception):
    """Nothing that is known of a request identifies its KV."""


def extra(request: Request, adapters: Adapters) -> dict[str, Any] | None:
    """The part of the key that is not token ids, or None for a plain text request.

    Raises `NotCacheable` where token ids and this together do not identify the request's KV.
    """
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None or not request.prompt_token_ids:
        raise NotCacheable
    found: dict[str, Any] = {}
    items = [_item(feature) for feature in request.mm_features or ()]
    if items:
        found["multimodal"] = items
    lora = request.lora_request
    if lora is not None:
        if (digest := adapters.digest(lora)) is None:
            raise NotCacheable
        base, is_3d = lora.base_model_name or "", int(lora.is_3d_lora_weight)
        found["lora"] = {"name": lora.lora_name, "path": lora.lora_path, "digest": f"{base}:{is_3d}:{digest}"}
    if request.cache_salt:
        found["cache_salt"] = request.cache_salt
    return found or None


def numbers_media(vllm_config: VllmConfig) -> bool:
    """Whether vLLM names a multimodal input by its number since the start: after a restart, and in another server, the same name is
    another input's. Without its own caches vLLM does not look at what inputs are."""
    media = vllm_config.model_config.multimodal_config
    return media is not None and media.mm_processor_cache_gb == 0 and not vllm_config.cache_config.enable_prefix_caching


def skips(request: Request) -> tuple[bool, bool]:
    """Whether this request asks not to be stored, and not to be loaded.

    vLLM's own `skip_reading_prefix_cache` (prompt log probabilities) means that nothing may be loaded.
    """
    params = request.kv_transfer_params or {}
    skip_load = any(params.get(name) for name in SKIP_LOAD) or bool(request.skip_reading_prefix_cache)
    return any(params.get(name) for name in SKIP_SAVE), skip_load


def transferred(request: Request) -> int:
    """Tokens that another server says it has stored or is storing; 0 where none does, and for what is no such number."""
    tokens = (request.kv_transfer_params or {}).get(TRANSFERRED)
    return tokens if isinstance(tokens, int) and tokens > 0 else 0


def _item(feature: Any) -> tuple[str, int, int]:
    # The identifier carries the LoRA prefix that matters for encoder outputs; mm_hash may be
    # absent.
    place = feature.mm_position
    return feature.identifier, int(place.offset), int(place.length)
