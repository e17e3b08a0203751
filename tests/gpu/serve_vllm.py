"""Real vLLM with Forebay on a GPU: answers of loaded KV, and the time to the first token.

Usage: serve_vllm.py [--device cuda|cpu] [--drive DIR] [--out DIR] [--parts same,damage,…] [--backend NAME] [--compiled]

Each vLLM runs in a process of its own with a time limit, so that one that fails or hangs costs the
others nothing; its log lies in OUT. Parts of `ANSWERS` run beside each other, the timed ones
alone. A table comes at the end, and all that was seen is in OUT/serve.json.

Loaded KV is compared with KV that vLLM has in its own prefix cache: prompts are as long as whole
chunks and a few tokens, so both compute the same last tokens in the same shapes, and every token
must be equal. Computing the whole prompt in one piece rounds differently in 16 bits: whether it
gives the same tokens is reported, and is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serve_driver import Table, flip_bits, run_child

CHUNK = 256
#: Tokens behind the last whole chunk: less than a block of vLLM.
REST = 7
ANSWERS = ("same", "restart", "damage", "killed", "layerwise", "memory", "prefetch", "compiled", "server")
TIMED = ("drive", "ram", "overlap", "blend", "blend_ram")
FAILED_LOADS = "vllm:forebay_failed_loads"
COUNTED = ("vllm:forebay", "vllm:external_prefix", "vllm:prefix_cache")


def sizes(name: str) -> dict[str, int]:
    """Shapes of a model."""
    return {
        "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512},
        "small": {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 4096},
        # Llama 3.1 8B.
        "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
    }[name]


def make_model(folder: Path, size: str, dtype: str, weights: bool, device: str) -> None:
    """A Llama of random weights; without `weights` only its configuration, for vLLM's dummies."""
    shape = sizes(size)
    folder.mkdir(parents=True, exist_ok=True)
    config = shape | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 131072, "torch_dtype": dtype, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attention_bias": False, "mlp_bias": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if not weights:
        return
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1234)
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    kind = getattr(torch, dtype)

    def some(rows: int, columns: int, scale: float) -> Any:
        return (torch.randn(rows, columns, device=device) * scale / columns**0.5).to(kind).cpu()

    ones = torch.ones(hidden, dtype=kind)
    # Queries and keys so large that attention chooses, and a last layer so large that one token
    # wins by far.
    made = {"model.embed_tokens.weight": some(shape["vocab_size"], hidden, hidden**0.5), "model.norm.weight": ones}
    made["lm_head.weight"] = some(shape["vocab_size"], hidden, 6.0)
    for layer in range(shape["num_hidden_layers"]):
        of = f"model.layers.{layer}."
        made |= {
            of + "self_attn.q_proj.weight": some(heads, hidden, 2.0),
            of + "self_attn.k_proj.weight": some(kv, hidden, 2.0),
            of + "self_attn.v_proj.weight": some(kv, hidden, 2.0),
            of + "self_attn.o_proj.weight": some(hidden, heads, 2.0),
            of + "mlp.gate_proj.weight": some(inner, hidden, 1.0),
            of + "mlp.up_proj.weight": some(inner, hidden, 1.0),
            of + "mlp.down_proj.weight": some(hidden, inner, 1.0),
            of + "input_layernorm.weight": ones.clone(),
            of + "post_attention_layernorm.weight": ones.clone(),
        }
    save_file(made, str(folder / "model.safetensors"), metadata={"format": "pt"})


# ---- one vLLM -----------------------------------------------------------------------------------


def arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `LLM`."""
    made: dict[str, Any] = {
        "model": spec["model"], "dtype": spec["dtype"], "enforce_eager": True, "seed": 0, "skip_tokenizer_init": True,
        "enable_prefix_caching": True, "disable_log_stats": False, "max_num_seqs": 8,
        "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": spec["kv_bytes"],
    }
    if spec["device"] == "cuda":
        made |= {"gpu_memory_utilization": spec.get("share", 0.1), "attention_backend": spec["backend"]}
    if spec.get("cache") is not None:
        made["kv_transfer_config"] = {
            "kv_connector": "ForebayConnector", "kv_role": "kv_both", "kv_connector_extra_config": spec["cache"],
        } | spec.get("transfer", {})
    return made | spec.get("engine", {})


def generate(llm: Any, prompts: list[list[int]], tokens: int, transfer: dict[str, Any] | None, together: bool = False) -> dict[str, Any]:
    """Answers, and the time that they took: with one token the time to the first. `together`: the others wait in vLLM's queue."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": transfer} if transfer else None
    sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, extra_args=extra)
    began = time.perf_counter()
    # One after the other: what is computed together depends on when each has been loaded.
    batches = [prompts] if together else [[p] for p in prompts]
    made = [one for b in batches for one in llm.generate([{"prompt_token_ids": p} for p in b], sampling, use_tqdm=False)]
    took = time.perf_counter() - began
    return {
        "tokens": [list(m.outputs[0].token_ids) for m in made],
        "reasons": [m.outputs[0].finish_reason for m in made],
        "cached": [m.num_cached_tokens for m in made],
        "seconds": took,
    }


def counters(llm: Any) -> dict[str, float]:
    """What vLLM counts of its connector."""
    return {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value") and m.name.startswith(COUNTED)}


def settle(llm: Any) -> None:
    """Waits until stores that go on after the answers have ended: makes vLLM step, as it counts with its steps, until the counters of
    stores stand still."""
    last, still = None, 0
    for _ in range(300):
        time.sleep(0.05)
        generate(llm, [[5, 6, 7]], 1, None)
        told = [(k, v) for k, v in counters(llm).items() if "stored" in k or "saves" in k or "already" in k]
        still = still + 1 if told == last else 0
        if still == 4:
            return
        last = told


def reset(llm: Any) -> None:
    """Empties vLLM's own prefix cache; blocks that are being stored keep it from that for a while."""
    for _ in range(100):
        if llm.reset_prefix_cache():
            return
        time.sleep(0.1)
        generate(llm, [[5, 6, 7]], 1, None)
    raise RuntimeError("vLLM's prefix cache could not be reset")


def engine_metrics() -> dict[str, float]:
    """The engine's own page; only with vLLM's worker in this process."""
    try:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        text = get_kv_transfer_group()._worker._engine.metrics()
    except Exception as error:  # noqa: BLE001
        return {f"no metrics: {error!r}": 0}
    found = re.findall(r"^(forebay_\S+) (\S+)$", text, re.M)
    return {k: float(v) for k, v in found if float(v) and "_bucket" not in k}


def child(spec: dict[str, Any], result: Path) -> None:
    """Runs the steps of one vLLM."""
    began = time.monotonic()
    from vllm import LLM

    llm = LLM(**arguments(spec))
    seen: dict[str, Any] = {"start_s": time.monotonic() - began, "steps": []}
    for step in spec["steps"]:
        if step.get("reset"):
            reset(llm)
        before = counters(llm)
        one = generate(llm, step["prompts"], step.get("tokens", 1), step.get("transfer"), step.get("together", False))
        if step.get("settle", True):
            settle(llm)
        after = counters(llm)
        one["counts"] = {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)}
        seen["steps"].append({"name": step["name"]} | one)
        result.write_text(json.dumps(seen))
        print(f"STEP {step['name']}: {one['seconds']:.3f} s, cached {one['cached']}, {one['counts']}", flush=True)
    if spec.get("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    seen["engine"] = engine_metrics()
    result.write_text(json.dumps(seen))
    print("ENGINE", json.dumps(seen["engine"]), flush=True)


# ---- parts --------------------------------------------------------------------------------------


class Bench(Table):
    """What the parts share."""

    def __init__(self, asked: argparse.Namespace) -> None:
        """Folders and models."""
        super().__init__()
        self.asked, self.out, self.work = asked, asked.out.resolve(), (asked.drive / "forebay-serve").resolve()
        self.cuda = asked.device == "cuda"
        self.out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)
        (self.work / "caches").mkdir(parents=True)
        self.dtype = "bfloat16" if self.cuda else "float32"
        source = random.Random(7)
        self.vocab = sizes("small" if self.cuda else "tiny")["vocab_size"]
        self.length = (asked.length or (6144 if self.cuda else 768)) // CHUNK * CHUNK + REST
        self.prompts = [self.prompt(source, self.length) for _ in range(2)]
        # Another beginning, the same end: shows that answers depend on the first chunk.
        self.other = [source.randrange(4, self.vocab) for _ in range(CHUNK)] + self.prompts[0][CHUNK:]

    def prompt(self, source: random.Random, length: int, vocab: int = 0) -> list[int]:
        """Random tokens."""
        return [source.randrange(4, vocab or self.vocab) for _ in range(length)]

    def environment(self) -> dict[str, str]:
        """Variables of a vLLM without a network."""
        made = os.environ | {
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONUNBUFFERED": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "HOME": str(self.work),
            "VLLM_CACHE_ROOT": str(self.work / "vllm-cache"), "TRITON_CACHE_DIR": str(self.work / "triton-cache"),
        }
        if not self.cuda:
            made |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return made

    def cache(self, name: str, **more: Any) -> dict[str, Any]:
        """`kv_connector_extra_config`."""
        return {"cache_dir": str(self.work / "caches" / name), "capacity": "2GiB", "min_free": 0, "chunk_size": CHUNK, "load_timeout_ms": 30000} | more

    def run(self, name: str, steps: list[dict[str, Any]], limit: float, size: str = "small", **more: Any) -> dict[str, Any]:
        """One vLLM; what its steps saw, also where it failed in the middle."""
        model = self.work / (size if self.cuda else "tiny")
        spec = {"model": str(model), "dtype": self.dtype, "device": self.asked.device, "backend": self.asked.backend,
                "kv_bytes": (2 << 30) if self.cuda else (256 << 20), "steps": steps}
        engine = {"max_model_len": 16384 if self.cuda else 4096} | more.pop("engine", {})
        spec |= {"engine": engine} | more
        spec_file, result, log = (self.out / f"{name}.{kind}" for kind in ("spec", "json", "log"))
        seen = run_child(__file__, spec, (spec_file, result, log), self.environment(), self.work, limit)
        code = seen["code"]
        self.seen[name] = seen
        text = log.read_text(errors="replace")
        paths = [k for k in seen.get("engine", {}) if k.startswith("forebay_io_path")]
        print(f"-- {name}: exit {code}, {seen['took_s']:.1f} s, start {seen.get('start_s', 0):.1f} s {paths}", flush=True)
        for line in text.splitlines():
            if "STEP" in line or ("WARNING" in line and "forebay" in line):
                print("  ", line[:300])
        if code not in (0, -9 if spec.get("die") else 0):
            print("\n".join("   | " + line[:300] for line in text.splitlines()[-25:]), flush=True)
        return seen

    # Answers.

    def loads(self, name: str, seen: dict[str, Any], want: list[list[int]], step: str, all_of: bool = True) -> None:
        """A step whose prompts must have been loaded, and whose answers must be `want`."""
        found = [s for s in seen["steps"] if s["name"] == step]
        if not found or not want:
            self.row(name, f"{step}: did not run", False)
            return
        one = found[0]
        loaded = one["counts"].get("vllm:external_prefix_cache_hits", 0)
        full = (self.length - REST) * len(one["tokens"])
        self.row(name, f"{step}: loaded {loaded:.0f} of {full} tokens", loaded == full if all_of else loaded > 0)
        self.row(name, f"{step}: answers equal", one["tokens"] == want)

    def step(self, seen: dict[str, Any], name: str) -> dict[str, Any]:
        """A step's own record."""
        return next((s for s in seen["steps"] if s["name"] == name), {"tokens": None, "counts": {}, "cached": []})

    def one_by_one(self, name: str, **more: Any) -> list[dict[str, Any]]:
        """A step of both prompts."""
        return [{"name": name, "prompts": self.prompts, "tokens": 64} | more]

    def cold(self) -> list[dict[str, Any]]:
        """Computed and stored; again from vLLM's own prefix cache; loaded."""
        return [*self.one_by_one("computed"), *self.one_by_one("own prefix cache"), *self.one_by_one("loaded", reset=True)]

    def same(self) -> None:
        """Everything in one process, then others that load what it stored."""
        control = [{"name": "other beginning", "prompts": [self.other], "tokens": 64}]
        seen = self.run("same", self.cold() + control, self.asked.limit, cache=self.cache("same"))
        computed, want = self.step(seen, "computed")["tokens"], self.step(seen, "own prefix cache")["tokens"]
        self.loads("same", seen, want, "loaded")
        self.row("same", f"computing all of it gives the same tokens: {computed == want}", None)
        other = self.step(seen, "other beginning")["tokens"]
        self.row("same", "another first chunk changes the answer", bool(other) and bool(want) and other[0] != want[0])
        stat = subprocess.run(["forebay", "stat", self.cache("same")["cache_dir"]], capture_output=True, text=True, check=False) if shutil.which("forebay") else None
        if stat is not None:
            print(stat.stdout[-1500:], stat.stderr[-500:], flush=True)
        if not want:
            return
        damaged = self.work / "caches" / "damaged"
        shutil.copytree(self.work / "caches" / "same", damaged)
        with ThreadPoolExecutor() as pool:
            todo = [pool.submit(self.restart, want)] if "restart" in self.asked.parts else []
            todo += [pool.submit(self.damage, want, computed)] if "damage" in self.asked.parts else []
            for one in todo:
                one.result()

    def restart(self, want: list[list[int]]) -> None:
        """Another process loads."""
        seen = self.run("restart", self.one_by_one("loaded"), self.asked.limit, cache=self.cache("same"))
        self.loads("restart", seen, want, "loaded")

    def damage(self, want: list[list[int]], computed: list[list[int]]) -> None:
        """A flipped bit in each page: what is found damaged is computed, stored again and loaded."""
        flipped = flip_bits(self.work / "caches" / "damaged")
        steps = [*self.one_by_one("damaged"), *self.one_by_one("again", reset=True), *self.one_by_one("repaired", reset=True)]
        seen = self.run("damage", steps, self.asked.limit, cache=self.cache("damaged"))
        one = self.step(seen, "damaged")
        failed = one["counts"].get(FAILED_LOADS, 0)
        self.row("damage", f"{flipped} pages damaged, {failed:.0f} loads failed", flipped > 0 and failed > 0)
        # Computed whole, or only what follows an intact part: these round differently, and both are
        # right.
        equal = one["tokens"] is not None and all(t in (a, b) for t, a, b in zip(one["tokens"], want, computed, strict=True))
        self.row("damage", "answers equal", equal)
        self.loads("damage", seen, want, "repaired")

    def killed(self) -> None:
        """kill -9 of the engine's process, then another one loads."""
        self.run("killed-1", self.cold()[:2], self.asked.limit, cache=self.cache("killed"), die=True)
        want = self.step(self.seen["killed-1"], "own prefix cache")["tokens"]
        self.row("killed", f"ended by SIGKILL: {self.seen['killed-1']['code'] == -9}", self.seen["killed-1"]["code"] == -9)
        seen = self.run("killed-2", self.one_by_one("loaded"), self.asked.limit, cache=self.cache("killed"))
        self.loads("killed", seen, want, "loaded")

    def variant(self, name: str, engine: dict[str, Any] | None = None, transfer: dict[str, Any] | None = None, **cache: Any) -> None:
        """`cold` with another setting."""
        more = {"transfer": transfer} if transfer else {}
        seen = self.run(name, self.cold(), self.asked.limit, cache=self.cache(name, **cache), engine=engine or {}, **more)
        self.loads(name, seen, self.step(seen, "own prefix cache")["tokens"], "loaded")

    def layerwise(self) -> None:
        """Layer by layer, while the step computes."""
        self.variant("layerwise", transfer={"kv_load_failure_policy": "fail"}, use_layerwise=True, max_sync_stall_ms=60000)

    def memory(self) -> None:
        """With the memory tier."""
        self.variant("memory", local_cpu=True, max_local_cpu_size=2)
        engine = self.seen["memory"].get("engine", {})
        hits = engine.get('forebay_memory_chunks_total{result="hit"}', 0)
        self.row("memory", f"{hits:.0f} chunks from memory, {engine.get('forebay_memory_loaded_bytes_total', 0) / 2**20:.0f} MiB", None)

    def prefetch(self) -> None:
        """A request that waits for another has its KV in the memory tier when its turn comes."""
        first = self.run("prefetch-1", self.cold()[:2], self.asked.limit, cache=self.cache("prefetch"))
        # vLLM has blocks for one of them: the other waits without any.
        longest, block = self.length + CHUNK, 16 if self.cuda else 128
        engine = {"max_num_seqs": 1, "max_model_len": longest, "block_size": block, "num_gpu_blocks_override": longest * 6 // 5 // block + 1}
        cache = self.cache("prefetch", local_cpu=True, max_local_cpu_size=2)
        seen = self.run("prefetch-2", self.one_by_one("loaded", together=True), self.asked.limit, cache=cache, engine=engine)
        self.loads("prefetch", seen, self.step(first, "own prefix cache")["tokens"], "loaded")
        counts = self.step(seen, "loaded")["counts"]
        read, used = (counts.get(f"vllm:forebay_{name}", 0) for name in ("prefetched_chunks", "prefetch_used_chunks"))
        self.row("prefetch", f"{read:.0f} chunks read ahead, {used:.0f} of them used", used > 0)

    def compiled(self) -> None:
        """vLLM's compilation and CUDA graphs on."""
        self.variant("compiled", engine={"enforce_eager": False, "cudagraph_capture_sizes": [1, 2, 4]} if self.cuda else {"enforce_eager": False})

    def server(self) -> None:
        """vLLM's OpenAI server in processes of its own, asked over HTTP, stopped and started again."""
        answers = []
        for number in range(2):
            said = self.serve(number)
            answers.append(said)
            if said is None:
                self.row("server", f"start {number + 1} failed", False)
                return
        hits = answers[1]["hits"]
        self.row("server", f"loaded {hits:.0f} of {self.length - REST} tokens", hits == self.length - REST)
        self.row("server", "answers equal", answers[1]["answer"] == answers[0]["again"])
        self.seen["server"] = answers

    def serve(self, number: int) -> dict[str, Any] | None:
        """One life of a server."""
        import socket
        import urllib.request

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        base = f"http://127.0.0.1:{port}"
        transfer = {"kv_connector": "ForebayConnector", "kv_role": "kv_both", "kv_connector_extra_config": self.cache("server")}
        model = self.work / ("small" if self.cuda else "tiny")
        options = ["--skip-tokenizer-init", "--dtype", self.dtype, "--enforce-eager", "--max-model-len", "16384" if self.cuda else "4096",
                   "--max-num-batched-tokens", "8192", "--port", str(port), "--shutdown-timeout", "10", "--kv-transfer-config", json.dumps(transfer),
                   "--max-num-seqs", "8"]
        if self.cuda:
            options += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2 << 30), "--attention-backend", self.asked.backend]
        log = self.out / f"server-{number + 1}.log"

        def ask(path: str, body: Any = None, limit: float = 60) -> bytes:
            data = None if body is None else json.dumps(body).encode()
            with urllib.request.urlopen(urllib.request.Request(base + path, data, {"Content-Type": "application/json"}), timeout=limit) as answer:
                return bytes(answer.read())

        began = time.monotonic()
        with log.open("wb") as to:
            running = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options], stdout=to, stderr=subprocess.STDOUT,
                env=self.environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, cwd=self.work, start_new_session=True,
            )
        try:
            while True:
                try:
                    ask("/health", limit=2)
                    break
                except OSError:
                    if running.poll() is not None or time.monotonic() - began > self.asked.limit:
                        raise RuntimeError("it did not start") from None
                    time.sleep(0.3)
            body = {"model": str(model), "prompt": self.prompts[0], "max_tokens": 64, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "detokenize": False}
            told = {}
            for name in ("answer", "again"):
                told[name] = json.loads(ask("/v1/completions", body))["choices"][0]["token_ids"]
                time.sleep(1)
            page = ask("/metrics").decode()
            hits = sum(float(v) for v in re.findall(r"^vllm:external_prefix_cache_hits_total\S* (\S+)$", page, re.M))
            print(f"-- server {number + 1}: {time.monotonic() - began:.1f} s, loaded {hits:.0f}", flush=True)
            return told | {"hits": hits}
        except Exception as error:  # noqa: BLE001
            print(f"-- server {number + 1}: {error!r}\n" + "\n".join("   | " + line[:300] for line in log.read_text(errors="replace").splitlines()[-25:]), flush=True)
            return None
        finally:
            running.terminate()
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                pass
            try:
                os.killpg(running.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            running.wait()

    # Times.

    def drive(self) -> None:
        """Computed, and loaded from the drive."""
        self.timed("drive")

    def ram(self) -> None:
        """Computed, and loaded from the memory tier."""
        self.timed("ram", local_cpu=True, max_local_cpu_size=8 if self.cuda else 0.5, codec="none")

    def timed(self, name: str, **more: Any) -> None:
        """Time to the first token of two lengths, in turn: computed without the cache, and loaded."""
        lengths = [8192, 32768] if self.cuda else [512, 1024]
        source, vocab = random.Random(11), sizes("8b" if self.cuda else "tiny")["vocab_size"]
        skip = {"forebay.skip_save": True, "forebay.skip_load": True}
        stored = {n: self.prompt(source, n + REST, vocab) for n in lengths}
        steps: list[dict[str, Any]] = [{"name": "warm-up", "prompts": [self.prompt(source, n, vocab)], "transfer": skip} for n in lengths]
        for n in lengths:
            # More than once: a chunk for which `store_staging` has no room is not stored the first
            # time.
            steps += [{"name": f"store {n}", "prompts": [stored[n]], "reset": True}] * 3
        for _ in range(self.asked.rounds):
            for n in lengths:
                steps.append({"name": f"computed {n}", "prompts": [self.prompt(source, n + REST, vocab)], "transfer": skip, "reset": True, "settle": False})
                steps.append({"name": f"loaded {n}", "prompts": [stored[n]], "reset": True, "settle": False})
        # After 15 measurements of each rate the connector does what is faster.
        for _ in range(self.asked.decisions):
            steps.append({"name": "own choice", "prompts": [stored[lengths[0]]], "reset": True, "settle": False})
        more = {"capacity": "24GiB" if self.cuda else "2GiB"} | more
        engine: dict[str, Any] = {"max_model_len": 33024, "load_format": "dummy"} if self.cuda else {}
        if self.asked.compiled:
            engine |= {"enforce_eager": False, "cudagraph_capture_sizes": [1, 2, 4]}
        seen = self.run(name, steps, self.asked.long_limit, size="8b", cache=self.cache(name, **more), engine=engine,
                        kv_bytes=(12 << 30) if self.cuda else (256 << 20), share=0.5)
        for n in lengths:
            times = {}
            for kind in ("computed", "loaded"):
                of = [s for s in seen["steps"] if s["name"] == f"{kind} {n}"]
                if of:
                    times[kind] = statistics.median(s["seconds"] for s in of)
                    spread = f"{min(s['seconds'] for s in of):.3f} to {max(s['seconds'] for s in of):.3f}"
                    took = statistics.median(s["counts"].get("vllm:external_prefix_cache_hits", 0) for s in of)
                    self.row(name, f"{kind} {n}: {times[kind]:.3f} s ({spread}), {len(of)} times, {took:.0f} tokens loaded", None)
            if len(times) == 2:
                self.row(name, f"{n}: loading takes {times['loaded'] / times['computed']:.2f} of computing", None)
        own = [s for s in seen["steps"] if s["name"] == "own choice"]
        chosen = sum(s["counts"].get("vllm:external_prefix_cache_hits", 0) > 0 for s in own)
        slower = sum(s["counts"].get("vllm:forebay_scheduler_slower_than_computing", 0) for s in own)
        self.row(name, f"its own choice: {chosen} of {len(own)} loaded, {slower:.0f} counted as slower than computing", None)
        engine_seen = seen.get("engine", {})
        told = {k: v for k, v in engine_seen.items() if re.match(r"forebay_(io_path|memory_(chunks|loaded|filled|evicted)|shed|missed|io_bytes|io_seconds|load_seconds_(sum|count))", k)}
        print("  ", json.dumps(told), flush=True)
        if not own:
            self.row(name, "did not end", False)

    def overlap(self) -> None:
        """A prefix in the memory tier and a suffix to compute: loaded whole before it, and layer by layer beside it. One vLLM after the
        other; what the suffix takes alone is measured in both, with the prefix in vLLM's own cache."""
        prefix, suffixes = (32768, (512, 2048, 8192)) if self.cuda else (768, (64, 128))
        vocab = sizes("8b" if self.cuda else "tiny")["vocab_size"]
        layers = sizes("8b" if self.cuda else "tiny")["num_hidden_layers"]
        took: dict[tuple[str, int], list[float]] = {}
        for mode, cache in {"whole": {"use_layerwise": False}, "layers": {"use_layerwise": True, "max_sync_stall_ms": 60000}}.items():
            source = random.Random(23)
            begin, skip = self.prompt(source, prefix, vocab), {"forebay.skip_save": True}
            # More than once: a chunk for which `store_staging` has no room is not stored at first.
            steps: list[dict[str, Any]] = [{"name": "store", "prompts": [[*begin, *self.prompt(source, REST, vocab)]], "reset": True}] * 3
            for number in range(self.asked.rounds + 1):
                for suffix in suffixes:
                    # The first round compiles kernels.
                    for name in ("loaded", "cached"):
                        made = {"name": f"{name} {suffix}" if number else "warm-up", "prompts": [[*begin, *self.prompt(source, suffix, vocab)]]}
                        steps.append(made | {"transfer": skip, "reset": name == "loaded", "settle": False})
            engine: dict[str, Any] = {"max_model_len": prefix + 8192 + 256, "load_format": "dummy"} if self.cuda else {}
            seen = self.run(
                f"overlap-{mode}", steps, self.asked.long_limit, size="8b", engine=engine, kv_bytes=(12 << 30) if self.cuda else (256 << 20), share=0.5,
                transfer={"kv_load_failure_policy": "fail"},
                cache=self.cache(f"overlap-{mode}", capacity="16GiB" if self.cuda else "2GiB", local_cpu=True, max_local_cpu_size=8 if self.cuda else 0.5, codec="none", **cache),
            )
            for suffix in suffixes:
                loaded, cached = ([s for s in seen["steps"] if s["name"] == f"{name} {suffix}"] for name in ("loaded", "cached"))
                all_of = [s["counts"].get("vllm:external_prefix_cache_hits", 0) >= prefix for s in loaded]
                self.row("overlap", f"{mode}, suffix of {suffix}: the prefix was loaded {sum(all_of)} of {len(all_of)} times", bool(all_of) and all(all_of))
                took[mode, suffix] = [s["seconds"] for s in loaded]
                took.setdefault(("cached", suffix), []).extend(s["seconds"] for s in cached)
        for suffix in suffixes:
            if not all(took.get((mode, suffix)) for mode in ("whole", "layers", "cached")):
                continue
            whole, by_layers, compute = (statistics.median(took[mode, suffix]) for mode in ("whole", "layers", "cached"))
            load = max(whole - compute, 0)
            aim = (max(load, compute) + min(load, compute) / layers) * 1.1
            spread = f"{min(took['layers', suffix]) * 1000:.1f} to {max(took['layers', suffix]) * 1000:.1f}"
            what = f"computing alone {compute * 1000:.1f} ms, loading before it {whole * 1000:.1f}, layer by layer {by_layers * 1000:.1f} ({spread})"
            self.row("overlap", f"prefix of {prefix}, suffix of {suffix}: {what}, aim {aim * 1000:.1f}", None)

    def blend(self) -> None:
        """Requests with segments: what must equal computing, on a small model, then times of an 8B's shapes."""
        began = time.monotonic()
        self.blend_answers(min(self.asked.limit, self.asked.blend_limit / 2))
        self.blend_times(self.asked.blend_limit - (time.monotonic() - began))

    def blend_ram(self) -> None:
        """The times with the segments in the memory tier."""
        self.blend_times(self.asked.long_limit, "blend_ram", local_cpu=True, max_local_cpu_size=2 if self.cuda else 0.5, codec="none")

    def segmented(self, source: random.Random, begin: int, count: int, piece: int, question: int, vocab: int) -> tuple[Any, list[list[int]]]:
        """What makes a prompt of segments in some order, and the segments' places, which are the same in each."""
        first, last = self.prompt(source, begin, vocab), self.prompt(source, question, vocab)
        parts = [self.prompt(source, piece, vocab) for _ in range(count)]
        places = [[begin + i * piece, begin + (i + 1) * piece] for i in range(count)]
        return lambda order: [*first, *(t for i in order for t in parts[i]), *last], places

    def blend_answers(self, limit: float) -> None:
        """All tokens computed anew, a segment at its stored place, and blends of each kind."""
        source, piece, count = random.Random(13), 512 if self.cuda else 96, 8 if self.cuda else 3
        made, places = self.segmented(source, 32, count, piece, 39, self.vocab)
        first, other, alone = made(range(count)), made(range(count)[::-1]), made([0])
        only = [places[0]]
        skip = {"forebay.skip_save": True, "forebay.skip_load": True}

        def step(name: str, prompt: list[int], places: list[list[int]], select: str, ratio: float, **more: Any) -> dict[str, Any]:
            how = {"forebay.segments": places, "forebay.blend_select": select, "forebay.blend_ratio": ratio} | more
            return {"name": name, "prompts": [prompt], "tokens": 16, "transfer": how, "reset": True}

        steps: list[dict[str, Any]] = [
            {"name": "computed", "prompts": [other], "tokens": 16, "transfer": skip},
            # What a blend covers computed by vLLM, then the rest behind its own prefix cache: the
            # same shapes as behind a blend.
            {"name": "to the end", "prompts": [other[: places[-1][1]]], "tokens": 1, "transfer": skip, "reset": True},
            {"name": "behind it", "prompts": [other], "tokens": 16, "transfer": skip},
            {"name": "prefix computed", "prompts": [alone[: only[0][1]]], "tokens": 1, "transfer": skip, "reset": True},
            {"name": "prefix", "prompts": [alone], "tokens": 16, "transfer": skip},
            step("stores", first, places, "none", 0.0, **{"forebay.store_segments": True}),
            step("all anew", other, places, "query", 1.0),
            step("in place", alone, only, "none", 0.0),
        ]
        for select, ratio in (("none", 0.0), ("query", 0.15), ("deviation", 0.15), ("first-k", 0.15)):
            steps.append(step(f"{select} {ratio}", other, places, select, ratio))
        steps.append({"name": "computed again", "prompts": [other], "tokens": 16, "transfer": skip, "reset": True})
        engine = {"worker_extension_cls": "forebay.vllm.blend.worker.BlendWorker"}
        seen = self.run("blend", steps, limit, cache=self.cache("blend", enable_blending=True), engine=engine)

        def counted(name: str, what: str) -> int:
            return round(self.step(seen, name)["counts"].get(f"vllm:forebay_blend_{what}", 0))

        computed = self.step(seen, "computed")["tokens"]
        self.row("blend", f"segments stored: {counted('stores', 'segments_stored')} of {count}", counted("stores", "segments_stored") == count)
        # vLLM computes it in one piece or in two, which round differently; both are right.
        wanted = {"all anew": (0, [computed, self.step(seen, "behind it")["tokens"]]), "in place": (piece, [self.step(seen, "prefix")["tokens"]])}
        for name, (reused, want) in wanted.items():
            told = counted(name, "tokens_reused"), counted(name, "tokens_recomputed")
            whole = counted(name, "requests") == 1 and told[0] <= reused and (told[0] > 0) == (reused > 0)
            self.row("blend", f"{name}: blended, {told[0]} tokens reused, {told[1]} computed anew", whole)
            self.row("blend", f"{name}: answers equal", bool(want[0]) and self.step(seen, name)["tokens"] in want)
        for select in ("none 0.0", "query 0.15", "deviation 0.15", "first-k 0.15"):
            one, all_of = self.step(seen, select), counted(select, "segments_reused")
            equal = sum(a == b for a, b in zip((one["tokens"] or [[]])[0], (computed or [[]])[0]))
            told = f"{counted(select, 'tokens_reused')} tokens reused, {counted(select, 'tokens_recomputed')} computed anew"
            self.row("blend", f"{select}: {all_of} of {count} segments, {told}, {equal} of 16 tokens as computed", all_of == count and bool(one["tokens"]))
        self.row("blend", "computed again: answers equal", bool(computed) and self.step(seen, "computed again")["tokens"] == computed)

    def blend_times(self, limit: float, part: str = "blend", **more: Any) -> None:
        """Time to the first token of 16 segments of 240 tokens and 256 more, in another order each time. A segment is stored behind the 16
        tokens of the beginning, so with them it fills a chunk."""
        source, vocab = random.Random(17), sizes("8b" if self.cuda else "tiny")["vocab_size"]
        count, piece, begin, question = (16, 240, 16, 240) if self.cuda else (4, 96, 32, 32)
        made, places = self.segmented(source, begin, count, piece, question, vocab)
        skip = {"forebay.skip_save": True, "forebay.skip_load": True}
        kinds = {"computed": skip}
        for select, ratio in (("none", 0.0), ("query", 0.15)):
            kinds[f"{select} {ratio}"] = {"forebay.segments": places, "forebay.blend_select": select, "forebay.blend_ratio": ratio}

        def order() -> list[int]:
            return source.sample(range(count), count)

        store = {"forebay.segments": places, "forebay.blend_select": "none", "forebay.store_segments": True}
        steps: list[dict[str, Any]] = [{"name": "stores", "prompts": [made(order())], "transfer": store, "settle": False}]
        for number in range(self.asked.rounds + 1):
            shuffled = made(order())
            for name, how in kinds.items():
                # The first round compiles kernels and makes memory.
                steps.append({"name": name if number else f"warm-up {name}", "prompts": [shuffled], "transfer": how, "reset": True, "settle": False})
        engine: dict[str, Any] = {"worker_extension_cls": "forebay.vllm.blend.worker.BlendWorker"}
        if self.cuda:
            engine |= {"max_model_len": 8192, "load_format": "dummy"}
        if self.asked.compiled:
            engine |= {"enforce_eager": False, "cudagraph_capture_sizes": [1, 2, 4]}
        cache = self.cache(f"{part}-times", enable_blending=True, capacity="8GiB" if self.cuda else "1GiB", **more)
        seen = self.run(f"{part}-times", steps, limit, size="8b", cache=cache, engine=engine, kv_bytes=(4 << 30) if self.cuda else (256 << 20), share=0.5)
        table, computed = {}, None
        length = begin + count * piece + question
        for name in kinds:
            of = [s for s in seen["steps"] if s["name"] == name]
            if not of:
                self.row(part, f"time, {name}: did not run", False)
                continue
            took = sorted(s["seconds"] for s in of)
            reused = [round(s["counts"].get("vllm:forebay_blend_segments_reused", 0)) for s in of]
            table[name] = {"median_s": statistics.median(took), "seconds": took, "cached": [s["cached"][0] for s in of], "segments_reused": reused}
            computed = computed or table[name]["median_s"]
            share = table[name]["median_s"] / computed
            blended = name == "computed" or min(s["cached"][0] for s in of) > 0
            self.row(part, f"time, {length} tokens, {name}: {table[name]['median_s'] * 1000:.1f} ms ({took[0] * 1000:.1f} to {took[-1] * 1000:.1f}), {share:.2f} of computed", blended)
        print(part.upper(), json.dumps(table), flush=True)
        (self.out / f"{part}-times.json").write_text(json.dumps(table))

    def all(self) -> int:
        """The parts that were asked for."""
        began = time.monotonic()
        small = set(self.asked.parts) & {*ANSWERS, "blend"}
        size = "small" if self.cuda else "tiny"
        if small or not self.cuda:
            make_model(self.work / size, size, self.dtype, True, self.asked.device)
        if self.cuda and set(self.asked.parts) & {*TIMED}:
            make_model(self.work / "8b", "8b", self.dtype, False, "cpu")
        beside = [p for p in ANSWERS if p in self.asked.parts and p not in ("restart", "damage")]
        with ThreadPoolExecutor(self.asked.beside) as pool:
            for part, running in [(p, pool.submit(getattr(self, p))) for p in beside]:
                self.ended(part, running.result)
        for part in (p for p in TIMED if p in self.asked.parts):
            self.ended(part, getattr(self, part))
        return self.close(self.out / "serve.json", self.work, began)


def main() -> int:
    """Runs it; 0 where nothing failed."""
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--drive", type=Path, default=Path("/var/tmp"), help="where caches and models go")
    parser.add_argument("--out", type=Path, default=Path("target/serve"), help="logs and serve.json")
    parser.add_argument("--parts", default="same,restart,damage,killed,layerwise,drive", help=f"of {', '.join(ANSWERS + TIMED)}")
    parser.add_argument("--backend", default="FLASH_ATTN", help="vLLM's attention backend")
    parser.add_argument("--compiled", action="store_true", help="vLLM's compilation and CUDA graphs in the timed parts")
    parser.add_argument("--length", type=int, help="tokens of the prompts whose answers are compared")
    parser.add_argument("--rounds", type=int, default=5, help="of the timed parts")
    parser.add_argument("--decisions", type=int, default=12, help="requests for which the connector chooses")
    parser.add_argument("--beside", type=int, default=4, help="so many parts at once")
    parser.add_argument("--limit", type=float, default=90, help="seconds of one vLLM")
    parser.add_argument("--blend-limit", type=float, default=116, help="seconds of the part blend")
    parser.add_argument("--long-limit", type=float, default=120, help="seconds of a timed vLLM")
    asked = parser.parse_args()
    asked.parts = asked.parts.split(",")
    if {"restart", "damage"} & set(asked.parts) and "same" not in asked.parts:
        # These run behind it, with its answers.
        asked.parts.insert(0, "same")
    unknown = set(asked.parts) - {*ANSWERS, *TIMED}
    if unknown:
        parser.error(f"unknown parts: {unknown}")
    return Bench(asked).all()


if __name__ == "__main__":
    sys.exit(main())
