"""Real SGLang with Forebay: answers of KV loaded through HiCache or the external linker, and the time to the first token.

Usage: serve_sglang.py [--device cuda|cpu] [--drive DIR] [--out DIR] [--parts same,restart,killed,damage,ttft,linker]

Each engine runs in a process group of its own with a time limit; its log lies in OUT. A table comes
at the end, and all that was seen is in OUT/sglang.json. On a CPU SGLang has no copies between device
and host memory: there those of ../sglang/on_cpu stand in for them (`make sglang-server`).

Loaded KV is compared with KV that SGLang has in its own tree: prompts are as long as whole pages and
a few tokens, so both compute the same last tokens in the same shapes, and every token must be equal.
Computing the whole prompt in one piece rounds differently in 16 bits: whether it gives the same
tokens is reported, and is no failure. On a CPU the tokens' log-probabilities must be equal too, to
the last bit: they also show a changed value that changes no token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ON_CPU = HERE.parent / "sglang" / "on_cpu"
sys.path.insert(0, str(HERE))
import serve_vllm as models  # noqa: E402  (after its folder is on the path)
from serve_driver import Table, flip_bits, run_child  # noqa: E402

PAGE = 64
#: Tokens behind the last whole page.
REST = 7
ANSWER = 32
#: Answers with fewer different tokens would be equal whatever was loaded.
DIFFERENT = 8
PARTS = ("same", "restart", "killed", "damage", "ttft", "linker")
#: A model that SGLang's external linker takes: latent KV and recurrent layers, without experts.
KIMI = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 4096, "hidden_size": 1024,
    "head_dim": 128, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "num_experts": None, "first_k_dense_replace": 4, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "model_max_length": 16384,
    "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 128, "num_heads": 8, "short_conv_kernel_size": 4},
    "max_position_embeddings": 16384, "torch_dtype": "bfloat16", "dtype": "bfloat16",
}


# ---- one engine ---------------------------------------------------------------------------------


def flags(cache: dict[str, str], is_linker: bool) -> dict[str, Any]:
    """What `python -m forebay.sglang` prints, as arguments of `Engine`."""
    given = [f"--set={key}={value}" for key, value in cache.items() if key not in ("cache_dir", "capacity")]
    ask = [sys.executable, "-m", "forebay.sglang", "--cache-dir", cache["cache_dir"], "--capacity", cache["capacity"], *given]
    ask += ["--linker"] if is_linker else []
    words = shlex.split(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)
    made: dict[str, Any] = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            has_value = at + 1 < len(words) and not words[at + 1].startswith("--")
            made[word[2:].replace("-", "_")] = words[at + 1] if has_value else True
    made["page_size"] = int(made["page_size"])
    if is_linker:
        made["unified_cache_external_linker_config"] = json.loads(made["unified_cache_external_linker_config"])
    else:
        made |= {"hicache_ratio": 2.0, "hicache_storage_prefetch_policy": "wait_complete"}
    return made


def arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `Engine`."""
    is_cuda = spec["device"] == "cuda"
    return {
        "model_path": spec["model"], "device": spec["device"], "dtype": "bfloat16", "skip_tokenizer_init": True,
        "random_seed": 0, "log_level": "info", "enable_cache_report": True, "page_size": PAGE,
        "attention_backend": "triton" if is_cuda else "torch_native", "sampling_backend": "pytorch",
        "grammar_backend": "none", "cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled",
        "disable_overlap_schedule": True, "disable_flashinfer_autotune": True, "max_running_requests": 4, "chunked_prefill_size": 16384,
        "context_length": 16384, "max_total_tokens": 32768, "mem_fraction_static": 0.3, "watchdog_timeout": 60,
    } | flags(spec["cache"], spec.get("linker", False)) | spec.get("engine", {})


def stored(cache_dir: str) -> int:
    """Pages on the drive: objects below HiCache, chunks below the linker."""
    told = subprocess.run([sys.executable, "-m", "forebay", "stat", "--json", cache_dir], capture_output=True, text=True, check=False)
    if told.returncode:
        return -1
    spaces = [space for drive in json.loads(told.stdout)["drives"] for space in drive["namespaces"]]
    return sum(shard["objects"] + shard["chunks"] for space in spaces for shard in space["shards"])


def settle(cache_dir: str, least: int) -> int:
    """Waits until so many pages are on the drive and no more come; how many there are."""
    last, still, until = -1, 0, time.monotonic() + 20
    while time.monotonic() < until and (still < 3 or last < least):
        time.sleep(0.3)
        now = stored(cache_dir)
        still, last = (still + 1 if now == last else 0), now
    return last


def flush(engine: Any) -> None:
    """Empties SGLang's tree and its host memory; what is on the drive stays."""
    for _ in range(100):
        if engine.flush_cache().success:
            return
        time.sleep(0.1)
    raise RuntimeError("SGLang's cache could not be flushed")


def generate(engine: Any, prompts: list[list[int]], tokens: int, is_scored: bool) -> dict[str, Any]:
    """Answers, one after the other, and the time of all; with one token the time to the first."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    began = time.perf_counter()
    made = [engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=is_scored) for prompt in prompts]
    took = time.perf_counter() - began
    told = [one["meta_info"].get("cached_tokens_details") or {} for one in made]
    return {
        "tokens": [list(one["output_ids"]) for one in made],
        "scores": [[score for score, *_ in one["meta_info"].get("output_token_logprobs") or []] for one in made],
        "cached": [one["meta_info"].get("cached_tokens", 0) for one in made],
        "loaded": [one.get("storage", 0) for one in told],
        "device": [one.get("device", 0) for one in told],
        "seconds": took,
    }


def child(spec: dict[str, Any], result: Path) -> None:
    """Runs the steps of one engine."""
    began = time.monotonic()
    import sglang

    engine = sglang.Engine(**arguments(spec))
    seen: dict[str, Any] = {"start_s": time.monotonic() - began, "steps": []}
    print(f"STEP start: {seen['start_s']:.1f} s", flush=True)
    for step in spec["steps"]:
        if step.get("flush"):
            flush(engine)
        one = generate(engine, step["prompts"], step.get("tokens", ANSWER), spec["device"] == "cpu")
        if "settle" in step:
            one["pages"] = settle(spec["cache"]["cache_dir"], step["settle"])
        seen["steps"].append({"name": step["name"]} | one)
        result.write_text(json.dumps(seen))
        told = {key: one[key] for key in ("cached", "loaded", "device", "pages") if key in one}
        print(f"STEP {step['name']}: {one['seconds']:.3f} s, {told}", flush=True)
    if spec.get("die"):
        os.killpg(0, signal.SIGKILL)
    engine.shutdown()


def on_cpu(work: Path) -> dict[str, str]:
    """What the processes of an engine need on a machine without a GPU."""
    import ninja

    # SGLang compiles its hash of pages at first use, and looks for ninja on the path.
    programs = Path(ninja.__file__).parent.parent / "bin"
    before = os.environ.get("PYTHONPATH")
    return {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ON_CPU}{os.pathsep}{before}" if before else str(ON_CPU),
        # The environment's packages are not compiled, and each engine imports thousands of modules.
        "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(work / "pycache"),
    }


# ---- parts --------------------------------------------------------------------------------------


class Bench(Table):
    """What the parts share."""

    def __init__(self, asked: argparse.Namespace) -> None:
        """Folders and prompts."""
        super().__init__()
        self.asked, self.out, self.work = asked, asked.out.resolve(), (asked.drive / "forebay-sglang").resolve()
        self.cuda = asked.device == "cuda"
        self.out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)
        (self.work / "caches").mkdir(parents=True)
        source = random.Random(7)
        self.size = "small" if self.cuda else "tiny"
        self.vocab = models.sizes(self.size)["vocab_size"]
        self.whole = (asked.length or (6144 if self.cuda else 768)) // PAGE * PAGE
        self.prompts = [self.prompt(source, self.whole + REST) for _ in range(2)]
        self.pages = len(self.prompts) * self.whole // PAGE
        # Another beginning, the same end: shows that answers depend on the first page.
        self.other = [source.randrange(4, self.vocab) for _ in range(PAGE)] + self.prompts[0][PAGE:]

    def prompt(self, source: random.Random, length: int, vocab: int = 0) -> list[int]:
        """Random tokens."""
        return [source.randrange(4, vocab or self.vocab) for _ in range(length)]

    def cache(self, name: str, capacity: str = "2GiB") -> dict[str, str]:
        """Forebay's settings."""
        folder = self.work / "caches" / name
        folder.mkdir(exist_ok=True)
        return {"cache_dir": str(folder), "capacity": capacity, "min_free": "0"}

    def run(self, name: str, steps: list[dict[str, Any]], limit: float, size: str = "", **more: Any) -> dict[str, Any]:
        """One engine; what its steps saw, also where it failed in the middle."""
        spec = {"model": str(self.work / (size or self.size)), "device": self.asked.device, "steps": steps} | more
        spec["engine"] = spec.get("engine", {}) | self.asked.engine
        spec_file, result, log = (self.out / f"sglang-{name}.{kind}" for kind in ("spec", "json", "log"))
        variables = os.environ | {
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "HOME": str(self.work),
            "TRITON_CACHE_DIR": str(self.work / "triton"), "SGLANG_JIT_CACHE_DIR": str(self.work / "jit"),
            # What one process found fastest is used by the next: other kernels round differently.
            "TRITON_CACHE_AUTOTUNING": "1",
        } | ({} if self.cuda else on_cpu(self.work))
        seen = run_child(__file__, spec, (spec_file, result, log), variables, self.work, limit)
        code = seen["code"]
        self.seen[name] = seen
        lines = log.read_text(errors="replace").splitlines()
        told = [f"-- {name}: exit {code}, {seen['took_s']:.1f} s"]
        # Not the paths of an environment in Forebay's own cache, nor a page of settings.
        ours = [line for line in lines if "orebay" in line.replace(".cache/forebay/", "") and "server_args=" not in line]
        told += ["   " + line[:300] for line in lines if line.startswith("STEP") or line in ours]
        if code not in (0, -9 if spec.get("die") else 0):
            told += ["   | " + line[:300] for line in lines[-40:]]
        print("\n".join(told), flush=True)
        return seen

    def step(self, seen: dict[str, Any], name: str) -> dict[str, Any]:
        """A step's own record."""
        none = {"tokens": None, "scores": None, "loaded": [], "device": [], "cached": []}
        return next((s for s in seen["steps"] if s["name"] == name), none)

    def loads(self, part: str, seen: dict[str, Any], want: dict[str, Any], name: str) -> None:
        """A step whose prompts must have come from the drive whole, and whose answers must be those of `want`."""
        one = self.step(seen, name)
        if not one["tokens"] or not want["tokens"]:
            self.row(part, f"{name}: did not run", False)
            return
        self.row(part, f"{name}: loaded {one['loaded']} of {self.whole} tokens", one["loaded"] == [self.whole] * len(want["tokens"]))
        self.row(part, f"{name}: answers equal", one["tokens"] == want["tokens"])
        if not self.cuda:
            whole = all(len(scores) == ANSWER for scores in want["scores"])
            self.row(part, f"{name}: log-probabilities equal", whole and one["scores"] == want["scores"])

    def cold(self) -> list[dict[str, Any]]:
        """Computed, then again from SGLang's own tree, and stored."""
        return [{"name": "computed", "prompts": self.prompts}, {"name": "own tree", "prompts": self.prompts, "settle": self.pages}]

    def same(self) -> None:
        """Everything in one process, then others that load what it stored."""
        steps = [*self.cold(), {"name": "loaded", "prompts": self.prompts, "flush": True}, {"name": "other beginning", "prompts": [self.other]}]
        seen = self.run("same", steps, self.asked.limit, cache=self.cache("same"))
        computed, own = self.step(seen, "computed"), self.step(seen, "own tree")
        want = own["tokens"]
        different = [len(set(tokens)) for tokens in want or []]
        self.row("same", f"answers have {different} different tokens of {ANSWER}", min(different, default=0) >= DIFFERENT)
        self.row("same", f"own tree: {own['device']} of {self.whole} tokens", own["device"] == [self.whole] * len(self.prompts))
        self.row("same", f"{own.get('pages')} of {self.pages} pages on the drive", own.get("pages") == self.pages)
        self.loads("same", seen, own, "loaded")
        self.row("same", f"computing all of it gives the same tokens: {computed['tokens'] == want}", None)
        other = self.step(seen, "other beginning")["tokens"]
        self.row("same", "another first page changes the answer", bool(other) and bool(want) and other[0] != want[0])
        if not want:
            return
        if "damage" in self.asked.parts:
            shutil.copytree(self.work / "caches" / "same", self.work / "caches" / "damaged")
        with ThreadPoolExecutor() as pool:
            todo = [pool.submit(self.restart, own)] if "restart" in self.asked.parts else []
            todo += [pool.submit(self.damage, own, computed)] if "damage" in self.asked.parts else []
            for one in todo:
                one.result()

    def restart(self, want: dict[str, Any]) -> None:
        """Another process loads."""
        seen = self.run("restart", [{"name": "loaded", "prompts": self.prompts}], self.asked.limit, cache=self.cache("same"))
        self.loads("restart", seen, want, "loaded")

    def killed(self) -> None:
        """kill -9 of all of the engine's processes, then another one loads."""
        seen = self.run("killed-1", self.cold(), self.asked.limit, cache=self.cache("killed"), die=True)
        want = self.step(seen, "own tree")
        self.row("killed", f"ended by SIGKILL: {seen['code'] == -9}", seen["code"] == -9)
        seen = self.run("killed-2", [{"name": "loaded", "prompts": self.prompts}], self.asked.limit, cache=self.cache("killed"))
        self.loads("killed", seen, want, "loaded")

    def damage(self, want: dict[str, Any], computed: dict[str, Any]) -> None:
        """A flipped bit in each block: what is found damaged is computed, stored again and loaded."""
        flipped = flip_bits(self.work / "caches" / "damaged")
        steps = [{"name": "damaged", "prompts": self.prompts, "settle": self.pages}, {"name": "repaired", "prompts": self.prompts, "flush": True}]
        seen = self.run("damage", steps, self.asked.limit, cache=self.cache("damaged"))
        one = self.step(seen, "damaged")
        self.row("damage", f"{flipped} blocks damaged, {one['loaded']} tokens loaded", flipped > 0 and one["loaded"] == [0] * len(self.prompts))
        # Computed whole, or behind a part that SGLang computed before: these round differently, and
        # both are right.
        both = zip(one["tokens"] or [], want["tokens"], computed["tokens"], strict=False)
        equal = bool(one["tokens"]) and all(tokens in known for tokens, *known in both)
        self.row("damage", "answers equal", equal)
        self.loads("damage", seen, want, "repaired")

    def ttft(self) -> None:
        """Time to the first token of a model of 8B shapes: computed, and loaded from the drive, in turn."""
        length = 8192 if self.cuda else 768
        source, vocab = random.Random(11), models.sizes("8b" if self.cuda else "tiny")["vocab_size"]
        again = self.prompt(source, length + REST, vocab)
        pages = length // PAGE
        # The prompt is stored, and both ways run once before they are timed.
        steps: list[dict[str, Any]] = [{"name": "store", "prompts": [again], "tokens": 1, "settle": pages}]
        for number in range(self.asked.rounds + 1):
            warm = "" if number else "warm-up "
            steps.append({"name": f"{warm}loaded", "prompts": [again], "tokens": 1, "flush": True})
            fresh = self.prompt(source, length + REST, vocab)
            steps.append({"name": f"{warm}computed", "prompts": [fresh], "tokens": 1, "flush": True, "settle": (number + 2) * pages})
        more = {"load_format": "dummy", "mem_fraction_static": 0.5} if self.cuda else {}
        seen = self.run("ttft", steps, self.asked.long_limit, "8b" if self.cuda else "", cache=self.cache("ttft", "16GiB"), engine=more)
        median = {}
        for name, wanted in (("computed", 0), ("loaded", length)):
            of = [s for s in seen["steps"] if s["name"] == name]
            if not of:
                self.row("ttft", f"{name}: did not run", False)
                continue
            took = sorted(s["seconds"] for s in of)
            median[name] = statistics.median(took)
            from_drive = [s["loaded"][0] for s in of]
            told = f"{median[name]:.3f} s ({took[0]:.3f} to {took[-1]:.3f}), {from_drive} tokens loaded"
            self.row("ttft", f"{length} tokens, {name}: {told}", from_drive == [wanted] * len(of))
        if len(median) == 2:
            self.row("ttft", f"loading takes {median['loaded'] / median['computed']:.2f} of computing", None)

    def linker(self) -> None:
        """Through the external linker: in one process, then in another one."""
        model = self.work / "kimi"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(KIMI))
        more: dict[str, Any] = {"size": "kimi", "cache": self.cache("linker"), "linker": True, "engine": {"load_format": "dummy"}}
        steps = [*self.cold(), {"name": "loaded", "prompts": self.prompts, "flush": True}]
        steps[1]["settle"] = 1
        first = self.run("linker-1", steps, self.asked.long_limit, **more)
        second = self.run("linker-2", [{"name": "loaded", "prompts": self.prompts}], self.asked.limit, **more)
        own = self.step(first, "own tree")
        self.row("linker", f"own tree: {own['cached']} tokens, {own.get('pages')} pages on the drive", None)
        for seen, where in ((first, "one process"), (second, "another process")):
            one = self.step(seen, "loaded")
            # Where recurrent state was kept, a prompt can be resumed: not at each page.
            self.row("linker", f"{where}: {one['cached']} tokens loaded", bool(one["tokens"]) and min(one["cached"]) > 0)
            self.row("linker", f"{where}: answers equal", bool(own["tokens"]) and one["tokens"] == own["tokens"])

    def all(self) -> int:
        """The parts that were asked for."""
        began = time.monotonic()
        models.make_model(self.work / self.size, self.size, "bfloat16", True, self.asked.device)
        if self.cuda and "ttft" in self.asked.parts:
            models.make_model(self.work / "8b", "8b", "bfloat16", False, "cpu")
        with ThreadPoolExecutor(self.asked.beside) as pool:
            for part, running in [(p, pool.submit(getattr(self, p))) for p in ("same", "killed") if p in self.asked.parts]:
                self.ended(part, running.result)
        for part in (p for p in ("ttft", "linker") if p in self.asked.parts):
            self.ended(part, getattr(self, part))
        return self.close(self.out / "sglang.json", self.work, began)


def main() -> int:
    """Runs it; 0 where nothing failed."""
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--drive", type=Path, default=Path("/var/tmp"), help="where caches and models go")
    parser.add_argument("--out", type=Path, default=Path("target/sglang-gpu"), help="logs and sglang.json")
    parser.add_argument("--parts", default="same,restart,killed,damage", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--engine", type=json.loads, default={}, help="other arguments of SGLang's Engine, as JSON")
    parser.add_argument("--length", type=int, help="tokens of the prompts whose answers are compared")
    parser.add_argument("--rounds", type=int, default=3, help="of the timed part")
    parser.add_argument("--beside", type=int, default=2, help="so many parts at once")
    parser.add_argument("--limit", type=float, default=100, help="seconds of one engine")
    parser.add_argument("--long-limit", type=float, default=120, help="seconds of the timed engine")
    asked = parser.parse_args()
    asked.parts = asked.parts.split(",")
    if {"restart", "damage"} & set(asked.parts) and "same" not in asked.parts:
        # These run behind it, with its answers.
        asked.parts.insert(0, "same")
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"unknown parts: {unknown}")
    return Bench(asked).all()


if __name__ == "__main__":
    sys.exit(main())
