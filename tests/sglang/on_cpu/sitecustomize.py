"""Lets real SGLang run without a GPU: all of its processes import this, by PYTHONPATH.

Nothing of SGLang is replaced: its processes, scheduler, tree, HiCache controller, pools and storage
factory are its own, and so is `torch_native`, by which it computes attention. Stood in for are

- `transfer_kv_per_layer_pf_lf` and `transfer_kv_all_layer_lf_pf`, the copies between device and
  host memory: CUDA kernels of the package sglang-kernel, which SGLang does not import without a
  GPU, so that these names are missing. Here the same bytes are copied by torch.
- `torch.cuda.cudart`, of which SGLang calls `cudaHostRegister` and `cudaHostUnregister` on its host
  pools: torch fails in it without a driver. Here they do nothing: a CPU copies from any memory.
- Triton: ../no_triton.py, as in the other tests. None of its kernels can be launched: that raises.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

#: Calls the copies; imported before the first host pool is made.
POOLS = "sglang.srt.mem_cache.pool_host.mha"


def rows(whole: Any, size: int) -> Any:
    """A contiguous tensor's bytes in rows of `size`, without a copy."""
    import torch

    return whole.view(-1).view(torch.uint8).view(-1, size)


def at(address: int, count: int, size: int) -> Any:
    """So many rows of bytes that begin at an address."""
    import torch

    memory = (ctypes.c_uint8 * (count * size)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, size)


def load(
    *, src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any,
    layer_id: int, item_size: int, src_layout_dim: int,
) -> None:
    """One layer of some tokens, out of a pool that has all layers of a token side by side."""
    of = slice(layer_id * item_size, (layer_id + 1) * item_size)
    for source, to in ((src_k, dst_k), (src_v, dst_v)):
        rows(to, item_size)[dst_indices.long()] = rows(source, src_layout_dim)[src_indices.long(), of]


def back_up(
    *, src_k_layers: Any, dst_k: Any, src_v_layers: Any, dst_v: Any, src_indices: Any, dst_indices: Any,
    item_size: int, dst_layout_dim: int, num_layers: int,
) -> None:
    """All layers of some tokens, out of pools of one layer that are named by their addresses."""
    if not len(src_indices):
        return
    for sources, to in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, address in enumerate(sources.tolist()[:num_layers]):
            source = at(address, int(src_indices.max()) + 1, item_size)
            of = slice(layer * item_size, (layer + 1) * item_size)
            rows(to, dst_layout_dim)[dst_indices.long(), of] = source[src_indices.long()]


class Finder(importlib.abc.MetaPathFinder):
    """Adds to one module of SGLang what it has no use for without a GPU."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's own, with one more thing to do once it is loaded."""
        if name != POOLS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            raise ImportError(f"SGLang has no {name}")
        execute = spec.loader.exec_module

        def then(module: ModuleType) -> None:
            execute(module)
            self.add(module)

        spec.loader.exec_module = then  # type: ignore[method-assign]
        return spec

    @staticmethod
    def add(module: ModuleType) -> None:
        """What the text above names."""
        import torch

        done = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0, cudaGetErrorString=str)
        torch.cuda.cudart = lambda: done
        for name, stand_in in (("transfer_kv_per_layer_pf_lf", load), ("transfer_kv_all_layer_lf_pf", back_up)):
            if hasattr(module, name):
                raise ImportError(f"SGLang has its own {name} here: it must not be replaced")
            setattr(module, name, stand_in)


sys.meta_path.insert(0, Finder())
