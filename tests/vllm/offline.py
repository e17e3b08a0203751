"""One process with one vLLM: generates from a specification (JSON, see `Spec`), and writes tokens and metrics to a file.

Usage: offline.py SPEC RESULT. Between rounds vLLM's own prefix cache is emptied, so that what a later round did not compute
came from Forebay.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Spec:
    """What to run."""

    model: str
    prompts: list[list[int]]
    dtype: str = "float32"
    cache: dict[str, Any] | None = None
    """`kv_connector_extra_config`; without it no connector is used."""
    rounds: int = 1
    max_tokens: int = 8
    role: str = "kv_both"
    zero_stored: bool = False
    """Zeroes the whole KV cache before a step's stores begin, so that wrong KV is stored with valid checksums."""
    transfer: dict[str, Any] | None = None
    """The whole `kv_transfer_config`, for connectors around Forebay's; `cache` and `role` are not looked at then."""
    reset_connector: bool = False
    """The last reset between rounds is the connector's too."""
    engine: dict[str, Any] = field(default_factory=dict)
    """More arguments of `LLM`."""


def arguments(spec: Spec) -> dict[str, Any]:
    """Arguments of `LLM`."""
    made: dict[str, Any] = {
        "model": spec.model,
        "dtype": spec.dtype,
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "seed": 0,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
    }
    if spec.transfer is not None:
        made["kv_transfer_config"] = spec.transfer
    elif spec.cache is not None:
        made["kv_transfer_config"] = {
            "kv_connector": "ForebayConnector",
            "kv_role": spec.role,
            "kv_connector_extra_config": spec.cache,
        }
    if "kv_events_config" in spec.engine:
        from vllm.config import KVEventsConfig

        made["kv_events_config"] = KVEventsConfig(**spec.engine.pop("kv_events_config"))
    return made | spec.engine


def zero_stored() -> None:
    """Wraps the worker's half for a process of its own; only with the engine in this process."""
    from forebay.vllm.working import WorkerHalf

    register, end_step = WorkerHalf.register, WorkerHalf.end_step
    tensors: list[Any] = []

    def registered(self: WorkerHalf, kv_caches: dict[str, Any]) -> None:
        tensors.extend(kv_caches.values())
        register(self, kv_caches)

    def ended(self: WorkerHalf, meta: Any) -> None:
        for tensor in tensors:
            tensor.zero_()
        end_step(self, meta)

    WorkerHalf.register, WorkerHalf.end_step = registered, ended  # type: ignore[method-assign]


def main() -> None:
    """Runs the specification."""
    from vllm import LLM, SamplingParams

    spec = Spec(**json.loads(Path(sys.argv[1]).read_text()))
    if spec.zero_stored:
        zero_stored()
    llm = LLM(**arguments(spec))
    sampling = SamplingParams(temperature=0, max_tokens=spec.max_tokens, detokenize=False, ignore_eos=True)
    rounds = []
    for number in range(spec.rounds):
        if number:
            assert llm.reset_prefix_cache(reset_connector=spec.reset_connector and number == spec.rounds - 1)
        made = llm.generate([{"prompt_token_ids": p} for p in spec.prompts], sampling, use_tqdm=False)
        outputs = [
            {"tokens": list(m.outputs[0].token_ids), "reason": m.outputs[0].finish_reason, "cached": m.num_cached_tokens}
            for m in made
        ]
        rounds.append(outputs)
    metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    Path(sys.argv[2]).write_text(json.dumps({"rounds": rounds, "metrics": metrics}))


if __name__ == "__main__":
    main()
