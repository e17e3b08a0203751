"""SGLang's real pools, tree and controller on CPU tensors, over Forebay. No server: SGLang has none for a CPU like this."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import ninja

# SGLang compiles its hash of pages at first use, and looks for ninja on the path.
os.environ["PATH"] = f"{Path(ninja.__file__).parent.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
import torch  # noqa: E402
from forebay.sglang import weights  # noqa: E402
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MambaPool, MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402

PAGE, TOKENS, LAYERS, HEADS, DIM = 16, 256, 3, 2, 32


def server_args(storage: str | None = "dynamic", module: str = "forebay.sglang") -> ServerArgs:
    """SGLang's arguments, as the scheduler has them when it makes a backend; `storage` or `module` is another where it is attached later.
    `@` and a file: the module is in there."""
    config = module if module.startswith("@") else json.dumps({"module_path": module})
    given = {"hicache_storage_backend": storage, "hicache_storage_backend_extra_config": config}
    args = ServerArgs(model_path="dummy", load_format="dummy", page_size=PAGE, **given)
    set_global_server_args_for_scheduler(args)
    return args


def extra(cache: Path, **more: Any) -> dict[str, Any]:
    """The extra config that a user gives, as docs/sglang.md says it."""
    return {
        "backend_name": "forebay",
        "module_path": "forebay.sglang",
        "class_name": "HiCache",
        "interface_v1": 1,
        "cache_dir": str(cache),
        "capacity": "1GiB",
        "min_free": 0,
        **more,
    }


def config(cache: Path, *, is_mla: bool = False, tp: tuple[int, int] = (0, 1), more: dict[str, Any] | None = None, **given: Any) -> Any:
    """What SGLang's controller hands to a backend."""
    values: dict[str, Any] = {
        "tp_rank": tp[0],
        "tp_size": tp[1],
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": is_mla,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "served-name",
        "extra_config": extra(cache, **(more or {})),
    }
    return HiCacheStorageConfig(**(values | given))


def mha(layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, heads: int = HEADS, page: int = PAGE) -> MHATokenToKVPoolHost:
    """A host pool of K and V, made from a device pool as SGLang makes it."""
    device = MHATokenToKVPool(
        size=TOKENS, page_size=page, dtype=dtype, head_num=heads, head_dim=DIM, layer_num=LAYERS, device="cpu", enable_memory_saver=False
    )
    info = device.get_device_pool_infos()[0].buffer_info
    return MHATokenToKVPoolHost(
        info, 1.0, 0, page, layout, pin_memory=False, device_capacity_tokens=TOKENS, start_layer=0, end_layer=LAYERS
    )


def mla(layout: str = "page_first", latent: int = 64, rope: int = 16, page: int = PAGE) -> MLATokenToKVPoolHost:
    """A host pool of compressed rows, which all ranks hold alike."""
    device = MLATokenToKVPool(
        size=TOKENS,
        page_size=page,
        dtype=torch.bfloat16,
        kv_lora_rank=latent,
        qk_rope_head_dim=rope,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device.get_device_pool_infos()[0].buffer_info
    return MLATokenToKVPoolHost(
        info,
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


def mamba(layout: str = "page_first", heads: int = 2, state: int = 16, beside: tuple[torch.Tensor, ...] = ()) -> Any:
    """A host pool of recurrent state: two kinds of tensors, one slot a page; with tensors `beside` them it has no regions."""
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=heads, head_dim=16, state_size=state, conv_kernel=4
    )
    pool = MambaPool(
        size=TOKENS // PAGE,
        spec_state_size=TOKENS // PAGE,
        cache_params=Mamba2CacheParams(shape=shape, layers=list(range(LAYERS))),
        mamba_layer_ids=list(range(LAYERS)),
        device="cpu",
    )
    info = msgspec.structs.replace(pool.get_device_pool_infos()[0].buffer_info, extra_checkpoint_buffers=beside)
    return MambaPoolHost(info, 1.0, 0, device_capacity=TOKENS // PAGE, pin_memory=False, layout=layout)


def fill(pool: Any, seed: int) -> None:
    """Random bytes, all different from page to page."""
    generator = torch.Generator().manual_seed(seed)
    flat = pool.kv_buffer.view(torch.uint8)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))


def pages(pool: Any, first: int, count: int) -> torch.Tensor:
    """The indices of pages, as SGLang's allocator gives them."""
    return torch.arange(first * pool.page_size, (first + count) * pool.page_size, dtype=torch.int64)


def content(pool: Any, page: int) -> bytes:
    """A page's bytes in the pool's own flat form."""
    return raw_bytes(pool.get_data_page(page * pool.page_size))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def names(count: int, salt: str = "") -> list[str]:
    """Keys like SGLang's page hashes."""
    return [f"{salt:0<4}{at:060x}" for at in range(1, count + 1)]


def weight_updater(monkeypatch: Any) -> Any:
    """A process just started: what puts weights into its model, as SGLang's modules have it, whose calls answer with their names."""
    calls = {name: (lambda self, name=name, **_: name) for name in weights.CALLS}
    module: Any = ModuleType(weights.MODULE)
    setattr(module, weights.CLASS, type(weights.CLASS, (), calls))
    monkeypatch.setitem(sys.modules, weights.MODULE, module)
    for name in ("_exchanged", "_missed"):
        monkeypatch.setattr(weights, name, threading.Event())
    return getattr(module, weights.CLASS)()


@contextmanager
def backend(given: Any, pool: Any, **beside: Any) -> Iterator[Any]:
    """The backend that SGLang's factory makes, with its pools registered as the controller does it."""
    server_args()
    made = StorageBackendFactory.create_backend("dynamic", given, pool)
    try:
        made.register_mem_pool_host(pool)
        for name, other in itertools.chain([("kv", pool)], beside.items()):
            made.register_mem_host_pool_v2(other, name)
        made.on_host_pools_registered()
        yield made
    finally:
        made.close()
