"""One process with one vLLM: generates from a specification (JSON, see `Spec`), and writes tokens and metrics to a file.

Usage: offline.py SPEC RESULT. Before each round but the first vLLM's own prefix cache is emptied, unless the round says
otherwise, so that what a later round did not compute came from Forebay.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Round:
    """Prompts that are generated from together."""

    prompts: list[list[int]]
    max_tokens: int = 8
    salt: str | None = None
    """`cache_salt` of the prompts."""
    zero_stored: bool = False
    """Zeroes the whole KV cache before a step's stores begin, so that wrong KV is stored with valid checksums."""
    keep: bool = False
    """vLLM's own prefix cache is left as the round before left it."""
    lost: list[str] = field(default_factory=list)
    """Directories that are emptied before the round, under the running server."""


@dataclass
class Spec:
    """What to run."""

    model: str
    rounds: list[dict[str, Any]]
    dtype: str = "float32"
    cache: dict[str, Any] | None = None
    """`kv_connector_extra_config`; without it no connector is used."""
    role: str = "kv_both"
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


class ZeroStored:
    """Makes the connector's worker store zeros while `on`; only with the engine in this process."""

    def __init__(self) -> None:
        """Wraps the worker's methods; off at first."""
        from forebay.vllm.working import WorkerHalf

        self.on = False
        self.tensors: list[Any] = []
        register, wait_for_save = WorkerHalf.register_kv_caches, WorkerHalf.wait_for_save

        def registered(half: WorkerHalf, kv_caches: dict[str, Any]) -> None:
            self.tensors.extend(kv_caches.values())
            register(half, kv_caches)

        def ended(half: WorkerHalf, meta: Any) -> None:
            for tensor in self.tensors if self.on else ():
                tensor.zero_()
            wait_for_save(half, meta)

        WorkerHalf.register_kv_caches, WorkerHalf.wait_for_save = registered, ended  # type: ignore[method-assign]


TOLD = ("forebay_stored", "forebay_saves", "forebay_already_there", "kv_offload")
"""Parts of the names of counters of stores."""
STILL = 3
"""How often in a row the counters must be the same."""
SETTLE_S = 120


def storing() -> bool:
    """Whether the worker of this process stores; of one in another process only the counters tell."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return False
    group = get_kv_transfer_group()
    workers = [getattr(one, "_worker", None) for one in getattr(group, "_connectors", [group])]
    return any(worker.stats()["storing"] for worker in workers if type(worker).__name__ == "WorkerHalf")


def settle(llm: Any) -> None:
    """Waits until stores that go on after the answers have ended: makes vLLM step, as it counts with its steps, until nothing is being
    stored and the counters of stores stand still."""
    from vllm import SamplingParams

    one = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
    last, still, until = None, 0, time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        time.sleep(0.1)
        # Shorter than a block: nothing to look up or to store.
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], one, use_tqdm=False)
        told = [(m.name, m.value) for m in llm.get_metrics() if hasattr(m, "value") and any(t in m.name for t in TOLD)]
        still = still + 1 if told == last and not storing() else 0
        if still == STILL:
            return
        last = told
    raise AssertionError(f"stores have not ended: {last}")


def metrics(llm: Any) -> dict[str, float]:
    """Counters and gauges, by name or `name:cause`."""
    named = [(m.name + (f":{m.labels['cause']}" if "cause" in m.labels else ""), m.value) for m in llm.get_metrics() if hasattr(m, "value")]
    return dict(named)


def shed(llm: Any) -> float:
    """Chunks for which there was no room in time."""
    return metrics(llm).get("vllm:forebay_shed_chunks:no_space", 0)


def generate(llm: Any, asked: Round) -> dict[str, Any]:
    """One round."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=asked.max_tokens, detokenize=False, ignore_eos=True)
    salt = {} if asked.salt is None else {"cache_salt": asked.salt}
    given, before = [{"prompt_token_ids": p} | salt for p in asked.prompts], shed(llm)
    made = llm.generate(given, sampling, use_tqdm=False)
    outputs = [
        {"tokens": list(m.outputs[0].token_ids), "reason": m.outputs[0].finish_reason, "cached": m.num_cached_tokens}
        for m in made
    ]
    settle(llm)
    # Stores wait half a second for room, and a slow drive takes longer to open a server's first
    # segment.
    for _ in range(5):
        if (now := shed(llm)) == before:
            break
        before = now
        llm.generate(given, sampling, use_tqdm=False)
        settle(llm)
    return {"outputs": outputs, "metrics": metrics(llm)}


def main() -> None:
    """Runs the specification."""
    from vllm import LLM

    spec = Spec(**json.loads(Path(sys.argv[1]).read_text()))
    asked = [Round(**r) for r in spec.rounds]
    zero = ZeroStored() if any(r.zero_stored for r in asked) else None
    llm = LLM(**arguments(spec))
    rounds = []
    for number, one in enumerate(asked):
        if number and not one.keep:
            assert llm.reset_prefix_cache(reset_connector=spec.reset_connector and number == len(asked) - 1)
        if zero is not None:
            zero.on = one.zero_stored
        for directory in one.lost:
            shutil.rmtree(directory)
            Path(directory).mkdir()
        rounds.append(generate(llm, one))
    Path(sys.argv[2]).write_text(json.dumps(rounds))


if __name__ == "__main__":
    main()
