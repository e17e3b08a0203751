"""What the tier must know of vLLM beyond its interface for tiers, and where 0.32 and 0.33 differ.

vLLM hands a tier the sizes of its blocks, but not what decides their meaning: weights, quantisation, attention backend, the hash
of its block keys. That is in its `VllmConfig`, which is read from the frames of the constructors that are running; where none of
them has it the user must name the model himself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import TYPE_CHECKING, Any

from forebay.vllm import frames, identity
from forebay.vllm.geometry import Unsupported
from forebay.vllm.settings import FINGERPRINT

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = logging.getLogger("vllm.forebay")

#: Whose tiering interface this was written for.
VERSIONS = ("0.32", "0.33")
#: Counts the ways in which the same blocks were laid out and named.
FORMAT = 1
#: vLLM's hashes of blocks that start from a random seed in each process unless PYTHONHASHSEED is
#: set.
SEEDED_HASHES = ("xxhash", "xxhash_cbor")


def check_version() -> None:
    """Refuses a vLLM whose tiering is not known to be this one."""
    import vllm

    version = str(vllm.__version__)
    if not version.startswith(tuple(f"{v}." for v in VERSIONS)) and version not in VERSIONS:
        known = " and ".join(VERSIONS)
        raise Unsupported(
            f"vLLM {version}: the tier forebay knows the tiering interface of {known}; use one of these, or the connector "
            "ForebayConnector without vLLM's tiering"
        )


def find_config() -> VllmConfig | None:
    """The `VllmConfig` of the server that is being made, from the callers' frames."""
    return next(iter(frames.configs()), None)


def check_hashes(config: VllmConfig | None) -> str | None:
    """The name of the hash of vLLM's block keys; refuses one that names the same block differently after each start."""
    if config is None:
        return None
    name = str(config.cache_config.prefix_caching_hash_algo)
    if name in SEEDED_HASHES:
        if os.environ.get("PYTHONHASHSEED") is None:
            raise Unsupported(
                f"--prefix-caching-hash-algo {name} names blocks differently in every process, so nothing stored would be found "
                "after a restart; set PYTHONHASHSEED to the same number for all servers, or use sha256_cbor"
            )
        logger.warning("tier: %s is no cryptographic hash: prompts made for it can collide; sha256_cbor is safe", name)
    return name


def namespace(spec: OffloadingSpec, row_bytes: int, addition: str, config: VllmConfig | None) -> str:
    """The store's namespace: everything that decides the bytes of a block, in a digest."""
    if config is None and not addition:
        raise Unsupported(
            f"tier: this vLLM does not let a tier see its configuration; name model, revision and quantisation in `{FINGERPRINT}`"
        )
    offload = spec.config
    parallel = offload.parallel
    parts: dict[str, Any] = {
        "format": FORMAT,
        "model": offload.model.name,
        "dtype": offload.model.dtype,
        "row_bytes": row_bytes,
        "blocks_per_chunk": offload.cache.blocks_per_chunk,
        "tokens_per_hash": offload.cache.tokens_per_hash,
        "groups": [[g.group_id, g.tokens_per_block, list(g.layer_names)] for g in offload.groups],
        # A row has the blocks of all ranks side by side.
        "ranks": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "replicated": offload.replicated_layout,
        "canonical": offload.canonical_layout,
        "layout": offload.kv_cache_layout,
        "hash": check_hashes(config),
        "identity": addition if config is None else identity.fingerprint(config, addition),
    }
    text = json.dumps(parts, sort_keys=True)
    logger.debug("tier: namespace of %s", text)
    return f"vllm tier {FORMAT} {hashlib.sha256(text.encode()).hexdigest()}"
