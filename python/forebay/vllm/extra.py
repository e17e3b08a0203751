"""What, besides its token ids, decides a request's KV: multimodal inputs, LoRA, cache salt.

Two requests with the same tokens but another one of these must never share a key. Prompt embeddings have no token ids to
hash: such requests are never cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

SKIP_SAVE = "forebay.skip_save"
SKIP_LOAD = "forebay.skip_load"
#: What a producer answers and a consumer is asked with: tokens from the start whose KV the producer stores.
TRANSFERRED = "num_transferred_tokens"


def cacheable(request: Request) -> bool:
    """Whether token ids and `extra` together identify the request's KV."""
    return request.prompt_embeds is None and request.prompt_is_token_ids is None and bool(request.prompt_token_ids)


def extra(request: Request) -> dict[str, Any] | None:
    """The part of the key that is not token ids, or None for a plain text request."""
    found: dict[str, Any] = {}
    items = [_item(feature) for feature in request.mm_features or ()]
    if items:
        found["multimodal"] = items
    lora = request.lora_request
    if lora is not None:
        found["lora"] = {"name": lora.lora_name, "path": lora.lora_path, "digest": _lora_digest(lora)}
    if request.cache_salt:
        found["cache_salt"] = request.cache_salt
    return found or None


def skips(request: Request) -> tuple[bool, bool]:
    """Whether this request asks not to be stored, and not to be loaded.

    vLLM's own `skip_reading_prefix_cache` (prompt log probabilities) means that nothing may be loaded.
    """
    params = request.kv_transfer_params or {}
    skip_load = bool(params.get(SKIP_LOAD)) or bool(request.skip_reading_prefix_cache)
    return bool(params.get(SKIP_SAVE)), skip_load


def transferred(request: Request) -> int:
    """Tokens that another server says it has stored or is storing; 0 where none does, and for what is no such number."""
    tokens = (request.kv_transfer_params or {}).get(TRANSFERRED)
    return tokens if isinstance(tokens, int) and tokens > 0 else 0


def _item(feature: Any) -> tuple[str, int, int]:
    # The identifier carries the LoRA prefix that matters for encoder outputs; mm_hash may be absent.
    place = feature.mm_position
    return feature.identifier, int(place.offset), int(place.length)


def _lora_digest(lora: Any) -> str:
    return f"{lora.base_model_name or ''}:{int(lora.is_3d_lora_weight)}"
