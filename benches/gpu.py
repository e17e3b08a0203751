#!/usr/bin/env python3
"""Measures the engine on a GPU and writes docs/benchmarks-gpu.md.

Every ratio is of two things done in turn (A B B A ...) in the same run; a figure is the median of the pairs, with the smallest
and largest. Kernels and copies are timed in this process, through libforebay_gpu_hook.so, against PyTorch's copies of as many
bytes; loads from the drive by `forebay bench`; attention by CUDA events on PyTorch's stream while the hook feeds loads beside it.
Nothing here asserts: the table says what was measured, with the target beside it.

With --dry-run everything runs in small, on a stand-in libcuda where LD_LIBRARY_PATH names one; what needs PyTorch is named and left
out where it is not installed, and no figures are written.
"""

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

GIB, MIB = 1 << 30, 1 << 20
SCATTER, GATHER, PINNED_TO_STAGING, STAGING_TO_PINNED, PINNED_TO_PAGED = range(5)
DEFAULT_CTAS = 16
KV_BYTES_8B = 131072  # of one token of llama-3.1-8b in bf16: 32 layers x 2 x 8 heads x 128 x 2


def progress(text):
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Hook:
    """Our device side, in this process."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.fb_error.restype = ctypes.c_char_p
        self.lib.fb_open.restype = ctypes.c_void_p
        self.lib.fb_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_bool, ctypes.c_bool]
        for name, more in [("fb_bytes", []), ("fb_move", [ctypes.c_uint32]), ("fb_check", []), ("fb_feed_stop", [])]:
            function = getattr(self.lib, name)
            function.restype, function.argtypes = ctypes.c_double, [ctypes.c_void_p, *more]
        self.lib.fb_feed_start.restype = ctypes.c_int
        self.lib.fb_feed_start.argtypes = [ctypes.c_void_p, ctypes.c_double]
        self.lib.fb_close.argtypes = [ctypes.c_void_p]

    def check(self, value):
        if value < 0:
            raise RuntimeError(self.lib.fb_error().decode())
        return value

    def open(self, device, model, chunks, ctas, checksums=True, coded=False):
        handle = self.lib.fb_open(device.encode(), model.encode(), chunks, ctas, checksums, coded)
        if handle is None:
            raise RuntimeError(self.lib.fb_error().decode())
        return Opened(self, handle)


class Opened:
    def __init__(self, hook, handle):
        self.hook, self.lib, self.handle = hook, hook.lib, handle
        self.bytes = hook.check(self.lib.fb_bytes(handle))

    def move(self, what):
        return self.hook.check(self.lib.fb_move(self.handle, what))

    def wrong_bytes(self):
        return self.hook.check(self.lib.fb_check(self.handle))

    def feed(self, rate):
        self.hook.check(self.lib.fb_feed_start(self.handle, rate))

    def stop(self):
        return self.hook.check(self.lib.fb_feed_stop(self.handle))

    def close(self):
        self.lib.fb_close(self.handle)


class Bench:
    def __init__(self, args):
        self.args, self.rows, self.notes, self.left_out = args, [], {}, []
        self.hook = Hook(args.hook)
        self.pairs_of = 1 if args.dry_run else args.pairs
        self.torch = None
        try:
            import torch
            self.torch = torch if torch.cuda.is_available() else None
        except ImportError:
            pass
        if self.torch is None and not args.dry_run:
            sys.exit("PyTorch with CUDA is needed; --dry-run goes without")
        self.model = "tiny" if args.dry_run else "llama-3.1-8b"

    # -- measuring
    def row(self, title, target, figure, detail="", raw=None):
        self.rows.append({"title": title, "target": target, "figure": figure, "detail": detail, "raw": raw})
        progress(f"{title}: {figure} {detail}")

    def pairs(self, title, target, ours, peer, n=None):
        """`ours` and `peer` give rates; the figure is the ratio of the two."""
        ours(), peer()
        mine, theirs = [], []
        for i in range(n or self.pairs_of):
            for who in ("ours", "peer") if i % 2 == 0 else ("peer", "ours"):
                (mine if who == "ours" else theirs).append(ours() if who == "ours" else peer())
        ratios = [a / b for a, b in zip(mine, theirs)]
        self.row(title, target, f"{statistics.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f}; {len(ratios)} pairs)",
                 f"{statistics.median(mine) / 1e9:.2f} against {statistics.median(theirs) / 1e9:.2f} GB/s", {"ours": mine, "peer": theirs})

    def needs_torch(self, what):
        if self.torch is None:
            self.left_out.append(what)
        return self.torch is not None

    def torch_copy(self, nbytes, kind):
        """Rate of PyTorch's copy of `nbytes`: device to device, or pinned host memory to device."""
        torch = self.torch
        to = torch.empty(int(nbytes), dtype=torch.uint8, device="cuda")
        source = torch.empty(int(nbytes), dtype=torch.uint8, device="cuda") if kind == "device" else torch.empty(int(nbytes), dtype=torch.uint8, pin_memory=True)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def run():
            start.record()
            to.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            return nbytes / (start.elapsed_time(end) / 1e3)

        return run

    # -- what is measured
    def kernels(self):
        chunks = 2 if self.args.dry_run else 32
        for ctas, name in [(0, "no limit of thread blocks"), (DEFAULT_CTAS, f"{DEFAULT_CTAS} thread blocks, the default")]:
            for checksums, coded, crc in [(False, False, "without CRC"), (True, False, "with CRC"), (True, True, "with CRC and exp4")]:
                opened = self.hook.open(self.args.device, self.model, chunks, ctas, checksums, coded)
                for what, verb in [(SCATTER, "scatter"), (GATHER, "gather")]:
                    target = {(0, False): ">= 0.80", (0, True): ">= 0.40"}.get((ctas, checksums), ">= 50 GB/s") if what == SCATTER and not coded else ""
                    title = f"{verb} {crc} against a device-to-device copy, {name}"
                    ours = lambda: opened.bytes / opened.move(what)
                    if self.needs_torch(title):
                        self.pairs(title, target, ours, self.torch_copy(opened.bytes, "device"))
                    else:
                        progress(f"{title}: {ours() / 1e9:.2f} GB/s")
                opened.close()

    def pinned(self):
        opened = self.hook.open(self.args.device, self.model, 2 if self.args.dry_run else 16, DEFAULT_CTAS)
        ours = lambda: opened.bytes / opened.move(PINNED_TO_PAGED)
        if self.needs_torch("pinned memory to paged KV against PyTorch's pinned copy"):
            self.pairs("pinned memory to paged KV against PyTorch's copy from pinned memory", ">= 0.90", ours, self.torch_copy(opened.bytes, "pinned"))
        self.pairs("our copies from pinned memory, with and without scatter", "", ours, lambda: opened.bytes / opened.move(PINNED_TO_STAGING))
        opened.move(PINNED_TO_PAGED)
        self.row("wrong bytes in paged KV after that", "0", f"{opened.wrong_bytes():.0f}")
        opened.close()

    def forebay(self, *argv):
        argv = [self.args.forebay, "bench", "--output-format", "json", *map(str, argv)]
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()[-500:]}")
        return json.loads(done.stdout)["jobs"][0]

    def drive(self, directory):
        size = 16 * MIB if self.args.dry_run else self.args.size * GIB
        cache, raw = os.path.join(directory, "cache"), ["--bs", "1m", "--iodepth", 32, "--size", size, "--directory", directory, "--name", "raw"]
        prompt = [] if self.args.dry_run else ["--tokens", 2048]
        kv = ["--model", self.model, "--size", size, "--directory", cache, "--keep", *prompt]
        self.forebay("--rw", "store", *kv, "--device", self.args.device)
        self.forebay("--rw", "write", *raw)
        rate = lambda job: job["read"]["io_bytes"] / (job["read"]["runtime"] / 1e3 if job["read"].get("runtime") else 1e-9)
        host = lambda: rate(self.forebay("--rw", "read", *raw, "--ioengine", "uring"))
        paths = {}
        for engine in self.args.engines.split(","):
            load = ["--rw", "load", *kv, "--device", self.args.device, "--ioengine", engine]
            try:
                job = self.forebay(*load, "--verify")
                paths[engine] = job["forebay"]["path"]
                wrong = job["forebay"].get("wrong_bytes")
                self.row(f"wrong bytes loaded, ioengine {engine}", "0", f"{wrong}", f"path {paths[engine]}")
                self.pairs(f"load to paged KV ({engine}: {paths[engine]}) against raw io_uring into host memory", ">= 0.95 by the best path",
                           lambda: rate(self.forebay(*load)), host)
            except RuntimeError as e:
                self.row(f"load, ioengine {engine}", "", "did not run", str(e))
        try:
            plain = lambda: rate(self.forebay("--rw", "read", *raw, "--ioengine", "cufile", "--device", self.args.device))
            self.pairs("plain cuFileRead into GPU memory against raw io_uring into host memory", "", plain, host)
        except RuntimeError as e:
            self.row("plain cuFileRead", "", "did not run", str(e))
        self.notes["paths"] = paths
        direct = [p for p in paths.values() if p in ("cufile-gds", "cufile-p2p")]
        self.notes["gds"] = f"GDS DMA ran: {', '.join(sorted(set(direct)))}" if direct else "GDS DMA never run: no path was cufile-gds or cufile-p2p"
        plain_ms = self.forebay("--rw", "layerload", *kv, "--device", self.args.device)["forebay"]["load_ms"]
        layers = 4 if self.args.dry_run else 32
        for share in (0.5, 1.0, 2.0):
            us = max(1, int(plain_ms * 1e3 * share / layers))
            runs = [self.forebay("--rw", "layerload", *kv, "--device", self.args.device, "--compute-us", us)["forebay"]["overlap_efficiency"] for _ in range(self.pairs_of)]
            self.row(f"layers, attention {share} x load: (max + min/L) / wall", ">= 0.95", f"{statistics.median(runs):.3f} (min {min(runs):.3f}, max {max(runs):.3f})")

    def memory(self, directory):
        """Loads of what the memory tier has, against PyTorch's copies from pinned memory."""
        size = 16 * MIB if self.args.dry_run else self.args.size * GIB
        prompt = [] if self.args.dry_run else ["--tokens", 2048]
        load = ["--rw", "load", "--model", self.model, "--size", size, *prompt, "--local-cpu", 2 * size, "--device", self.args.device]

        def ours(*more):
            # A new cache each time: its stores bring everything into memory.
            return self.forebay(*load, "--directory", os.path.join(directory, "memory"), *more)

        def rate():
            job = ours()
            return job["read"]["io_bytes"] / (job["read"]["runtime"] / 1e3)

        job = ours("--verify")
        found = job["forebay"]
        self.row("wrong bytes loaded from the memory tier", "0", f"{found.get('wrong_bytes')}", f"{found.get('memory_hits')} chunks were in memory")
        if self.needs_torch("loads from the memory tier against copies from pinned memory"):
            self.pairs("load from the memory tier to paged KV against PyTorch's copy from pinned memory", ">= 0.80", rate, self.torch_copy(GIB, "pinned"), 3)

    def attention(self):
        """Attention of 8B shapes on PyTorch's stream, alone and while loads are fed from pinned memory."""
        if not self.needs_torch("attention beside loads"):
            return
        torch = self.torch
        q = torch.randn(1, 32, 2048, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(1, 32, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def attend(n=100):
            start.record()
            for _ in range(n):
                torch.nn.functional.scaled_dot_product_attention(q, k, v)
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / n

        # Small rounds, so that a feed below full rate is even.
        opened = self.hook.open(self.args.device, self.model, 4, DEFAULT_CTAS)
        attend()
        for rate, target, name in [(15e9, "<= 2 % at >= 14 GB/s", "15 GB/s"), (0.0, "<= 6 %", "full rate")]:
            slower, fed = [], []
            for i in range(1 if self.args.dry_run else 30):
                times = {}
                for loaded in (False, True) if i % 2 == 0 else (True, False):
                    if loaded:
                        opened.feed(rate)
                        time.sleep(0.02)
                    times[loaded] = attend()
                    if loaded:
                        fed.append(opened.stop())
                slower.append(times[True] / times[False] - 1)
            self.row(f"attention slowed by loads from pinned memory at {name}", target,
                     f"{statistics.median(slower) * 100:.2f} % (min {min(slower) * 100:.2f}, max {max(slower) * 100:.2f}; {len(slower)} pairs)",
                     f"fed {statistics.median(fed) / 1e9:.1f} GB/s", {"slower": slower, "fed": fed})
        opened.close()

    def prefill(self):
        """A 32K-token prefill of 8B shapes against the bytes of its KV: the drive speed at which loading breaks even."""
        if not self.needs_torch("a 32K-token prefill"):
            return
        torch, hidden, inner, tokens = self.torch, 4096, 14336, 1024 if self.args.dry_run else 32768
        make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02
        wq, wk, wv, wo = make(hidden, hidden), make(hidden, 1024), make(hidden, 1024), make(hidden, hidden)
        up, gate, down = make(hidden, inner), make(hidden, inner), make(inner, hidden)

        def layer(x):
            heads = lambda t, n: t.view(1, -1, n, 128).transpose(1, 2)
            k, v = (heads(x @ w, 8).repeat_interleave(4, dim=1) for w in (wk, wv))
            a = torch.nn.functional.scaled_dot_product_attention(heads(x @ wq, 32), k, v, is_causal=True)
            x = x + a.transpose(1, 2).reshape(1, -1, hidden) @ wo
            return x + (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        seconds = []
        with torch.no_grad():
            for _ in range(1 + self.pairs_of):
                x = make(1, tokens, hidden)
                start.record()
                for _ in range(32):
                    x = layer(x)
                end.record()
                end.synchronize()
                seconds.append(start.elapsed_time(end) / 1e3)
        s = statistics.median(seconds[1:])
        need = tokens * KV_BYTES_8B
        self.row(f"prefill of {tokens} tokens, 8B shapes, one layer's weights 32 times", "", f"{s:.3f} s",
                 f"its KV is {need / GIB:.2f} GiB: loading it is faster from {need / s / 1e9:.2f} GB/s on")

    # -- the report
    def machine(self):
        def said(*argv):
            try:
                return subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=30).stdout.strip()
            except OSError:
                return ""
        self.notes["GPU"] = said("nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current,memory.total", "--format=csv,noheader")
        self.notes["commit"] = self.args.commit or said("git", "rev-parse", "--short", "HEAD")
        self.notes["PyTorch"] = self.torch.__version__ if self.torch else "none"
        self.notes["probe"] = said(self.args.forebay, "probe", "--json", self.args.directory)[:4000]

    def write(self, path):
        with open(path, "w", encoding="utf-8") as out:
            print("# On a GPU: what was measured\n", file=out)
            print("Written by `make bench-gpu` (benches/gpu.py); how each figure is taken is said there.\n", file=out)
            for key in ("commit", "GPU", "PyTorch"):
                print(f"- {key}: {self.notes.get(key) or 'unknown'}", file=out)
            print(f"- **{self.notes.get('gds', 'GDS DMA never run: nothing was loaded from a drive')}**\n", file=out)
            print("| What | Target | Figure | Detail |\n|---|---|---|---|", file=out)
            for r in self.rows:
                print(f"| {r['title']} | {r['target']} | {r['figure']} | {r['detail']} |", file=out)
            for what in self.left_out:
                print(f"\nLeft out: {what}.", file=out)
        with open(os.path.splitext(path)[0] + ".json", "w", encoding="utf-8") as out:
            json.dump({"rows": self.rows, "notes": self.notes, "left_out": self.left_out}, out, indent=1)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--forebay", default="target/gpu/forebay")
    p.add_argument("--hook", default="target/gpu/libforebay_gpu_hook.so")
    p.add_argument("--device", default="cuda:0")
    p.add_argument("--directory", default=".", help="where the cache and raw files go: a local NVMe drive")
    p.add_argument("--commit", help="of the programs; by default that of the working tree")
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--engines", default="auto,uring,threads,cufile", help="ways from the drive to measure")
    p.add_argument("--size", type=int, default=8, help="GiB that are loaded from the drive at once")
    p.add_argument("--only", default="kernels,pinned,drive,memory,attention,prefill", help="parts to run, separated by commas")
    p.add_argument("--write", default="docs/benchmarks-gpu.md")
    p.add_argument("--dry-run", action="store_true")
    args = p.parse_args()
    bench = Bench(args)
    bench.machine()
    directory = tempfile.mkdtemp(prefix="forebay-gpu-", dir=args.directory)
    try:
        for part in args.only.split(","):
            getattr(bench, part)(*([directory] if part in ("drive", "memory") else []))
            if not args.dry_run:
                # After each part: a machine that is lent may be taken away.
                bench.write(args.write)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for what in bench.left_out:
        progress(f"left out without PyTorch: {what}")
    if args.dry_run:
        print(f"dry run: {len(bench.rows)} rows, {bench.notes.get('gds', '')}")
    else:
        print(open(args.write, encoding="utf-8").read())


if __name__ == "__main__":
    main()
