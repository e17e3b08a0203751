#!/usr/bin/env python3
"""Measures the engine against fio on the same file system, interleaved, and writes docs/benchmarks.md.

Every ratio is of two processes run in turn (A B B A ...), by their own clocks, payload bytes only: the geometric
mean of two medians, one for each order. fio's best point of a sweep is the peer. O_DIRECT is proven by /proc/<pid>/io: bytes read from the
device per byte loaded. Nothing here asserts: the table says what was measured, with the target beside it.
"""

import argparse
import json
import math
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time

GIB = 1 << 30
#: Where the table lies in the page.
BEGIN, END = "<!-- speed.py begins -->", "<!-- speed.py ends -->"
MIB = 1 << 20
CODECS = ("none", "exp4")
LAYERS = {"llama-3.1-8b": 32, "deepseek-v3": 61}
PROMPT_TOKENS = 2048  # of loads: 256 MiB of llama-3.1-8b, so that the destination is a small part of what is moved


def run(argv, env=None):
    """Runs one process to its end; wall and CPU seconds are taken from outside."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    wall = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, argv))}\nfailed with {done.returncode}:\n{done.stderr[-2000:]}{done.stdout[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": wall, "cpu": cpu, "out": done.stdout}


class Bench:
    def __init__(self, args, directory):
        self.args, self.dir = args, directory
        self.rows, self.notes = {}, {}
        self.fio_file = os.path.join(directory, "fio.bin")
        self.write_file = os.path.join(directory, "fio-write.bin")
        self.checked_file = os.path.join(directory, "fio-checked.bin")

    # -- the two programs
    def fio(self, rw, point, size, extra=()):
        bs, depth, jobs = point
        name = self.fio_file if rw in ("read", "rw", "randrw") else self.write_file
        if rw == "write":
            fresh_fallocated(name, size)
        part = size // jobs // (4 << 20) * (4 << 20)
        argv = ["fio", "--name=peer", f"--filename={name}", f"--rw={rw}", f"--bs={bs}", f"--iodepth={depth}", f"--numjobs={jobs}",
                f"--size={part}", f"--io_size={part}", f"--offset_increment={part}", "--ioengine=io_uring", "--direct=1", "--thread", "--group_reporting",
                # In 4 KiB pages a virtual drive takes fio's buffers as many small pieces: three
                # times slower.
                "--output-format=json", "--fallocate=none", "--overwrite=1", "--mem=mmaphuge", *extra]
        got = run(argv)
        job = json.loads(got["out"][got["out"].index("{"):])["jobs"][0]
        got["job"], got["bytes"] = job, job["read"]["io_bytes"] + job["write"]["io_bytes"]
        return got

    def write_checked(self, point, size):
        """A file with checksums, which fio writes and `fio_checking` reads."""
        fresh_fallocated(self.checked_file, size)
        run(["fio", *self.checked(point, size), "--rw=write", "--do_verify=0"])

    def fio_checking(self, point, size):
        """fio at that point, which compares what it has read with its checksums."""
        out = run(["fio", *self.checked(point, size), "--rw=read", "--output-format=json"])["out"]
        return {"job": json.loads(out[out.index("{"):])["jobs"][0]}

    def checked(self, point, size):
        bs, depth, _ = point
        return ["--name=checked", f"--filename={self.checked_file}", f"--size={size}", f"--bs={bs}", f"--iodepth={depth}", "--ioengine=io_uring",
                "--direct=1", "--thread", "--fallocate=none", "--overwrite=1", "--mem=mmaphuge", "--verify=crc32c", "--verify_state_save=0"]

    def forebay(self, *argv):
        got = run([self.args.forebay, "bench", "--output-format", "json", *map(str, argv)])
        got["job"] = json.loads(got["out"])["jobs"][0]
        got["bytes"] = got["job"]["read"]["io_bytes"] + got["job"]["write"]["io_bytes"]
        return got

    # -- measuring
    def sweep(self, rw, size):
        """fio's best point, and its best one with one job, by the clock that it is compared by; the drive's speed swings, so the
        points are run in turns."""
        points = [(bs, d, j) for bs in ("256k", "1m", "4m") for d in (4, 8, 32) for j in (1, 2)]
        rates = {point: [] for point in points}
        for _ in range(self.args.sweep_runs):
            for point in points:
                if rw == "write":
                    self.clean_written()
                rates[point].append(self.fio(rw, point, size)["job"][rw]["bw_bytes"])
                progress(f"fio {rw} {point}: {rates[point][-1] / 1e9:.2f} GB/s")
        table = [(point, statistics.median(of)) for point, of in rates.items()]
        self.notes[f"fio {rw} sweep, bs x iodepth x numjobs, GB/s"] = ", ".join(f"{p[0]}x{p[1]}x{p[2]} {r / 1e9:.2f}" for p, r in table)
        return tuple(max((of for of in table if of[0][2] <= jobs), key=lambda of: of[1])[0] for jobs in (2, 1))

    def clean_written(self):
        """What fio wrote is removed, so that it does not write to blocks that it has just given back."""
        if os.path.exists(self.write_file):
            os.unlink(self.write_file)
        os.sync()

    def pairs(self, title, target, ours, peer, rate=lambda g: g["bytes"] / g["wall"], more=lambda runs: "", before=lambda: None):
        ratios, mine, theirs, runs = [], [], [], []
        for i in range(self.args.pairs):
            before()
            first, second = (ours, peer) if i % 2 == 0 else (peer, ours)
            one, two = first(), second()
            a, b = (one, two) if i % 2 == 0 else (two, one)
            runs.append((a, b))
            mine.append(rate(a))
            theirs.append(rate(b))
            ratios.append(mine[-1] / theirs[-1])
            progress(f"{title}: pair {i + 1}: {mine[-1] / 1e9:.3f} against {theirs[-1] / 1e9:.3f}, ratio {ratios[-1]:.3f}")
        figure = f"{of_both_orders(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f}; {len(ratios)} pairs)"
        detail = f"{of_both_orders(mine) / 1e9:.2f} against {of_both_orders(theirs) / 1e9:.2f} GB/s {more(runs)}".strip()
        self.row(title, target, figure, detail, {"forebay_bytes_per_s": mine, "fio_bytes_per_s": theirs})
        return runs

    def row(self, title, target, figure, detail="", raw=None):
        self.rows[title] = {"target": target, "figure": figure, "detail": detail, "date": time.strftime("%Y-%m-%d %H:%M"), "raw": raw}
        progress(f"{title}: {figure} {detail}")

    def store_cache(self, model, size, *extra):
        directory = os.path.join(self.dir, f"cache-{model}")
        self.forebay("--rw", "store", "--model", model, "--size", size, "--directory", directory, "--keep", *extra)
        return directory

    def cpu_reference(self, model):
        """CPU seconds per byte of crc32fast and of a strided memcpy of the same bytes."""
        out = run(["cargo", "bench", "-q", "-p", "forebay", "--bench", "cpu_reference", "--", "--model", model])["out"]
        return json.loads(out[out.index("{"):])

    # -- the table
    def loads(self, point):
        size = self.args.size
        for model, target in (("llama-3.1-8b", 0.92), ("deepseek-v3", 0.95)):
            cache = self.store_cache(model, size, "--tokens", PROMPT_TOKENS)
            # By their own clocks: each process takes 2 GiB to load into, which a virtual machine
            # may give in 0.4 s or in 5.
            outside = lambda got: got["bytes"] / got["wall"]
            proof = lambda runs: "; device bytes per loaded byte {:.4f}; whole processes from outside, start included: {:.3f}".format(
                min(a["job"]["forebay"]["device_read_bytes"] / a["bytes"] for a, _ in runs),
                of_both_orders([outside(a) / outside(b) for a, b in runs]))
            ours = lambda jobs: self.forebay("--rw", "load", "--model", model, "--tokens", PROMPT_TOKENS, "--size", size, "--numjobs", jobs,
                                             "--directory", cache, "--keep")
            peer, own_clock = lambda: self.fio("read", point, size), lambda g: g["job"]["read"]["bw_bytes"]
            title = f"load, verified and scattered, {model}"
            if model == "llama-3.1-8b":
                self.pairs(f"{title}, four at once", ">= 0.95 x best fio", lambda: ours(4), peer, rate=own_clock, more=proof)
            runs = self.pairs(title, f">= {target} x best fio", lambda: ours(1), peer, rate=own_clock, more=proof)
            reference = self.cpu_reference(model)
            per_byte = reference["crc_s_per_byte"] + reference["copy_s_per_byte"]
            ratios = [(a["cpu"] / a["bytes"]) / (b["cpu"] / b["bytes"] + per_byte) for a, b in runs]
            mine = statistics.median(a["cpu"] / a["bytes"] for a, _ in runs) * 1e9
            self.row(f"CPU of those loads, {model}", "<= 1.2 x (fio + crc32fast + strided memcpy)",
                     f"{statistics.median(ratios):.2f}", f"{mine:.3f} s per GB")
            if model == "llama-3.1-8b":
                self.fairness(cache, model)
                self.write_checked(point, size)
                self.pairs(f"{title}, beside fio that checks its bytes too (crc32c)", "", lambda: ours(1), lambda: self.fio_checking(point, size),
                           rate=own_clock)
                os.unlink(self.checked_file)
            remove(cache)

    def stores(self, point):
        size = self.args.size

        def ours():
            directory = os.path.join(self.dir, "cache-store")
            return self.forebay("--rw", "store", "--model", "llama-3.1-8b", "--tokens", PROMPT_TOKENS, "--size", size, "--directory", directory,
                                "--keep")

        def outside(got):
            return got["bytes"] / got["wall"]

        def clean():
            """What both wrote is removed between pairs, and the drive told, so that neither writes to blocks just given back."""
            remove(os.path.join(self.dir, "cache-store"))
            self.clean_written()
            time.sleep(5)

        title = "store, gathered, journalled and flushed, llama-3.1-8b"
        self.pairs(title, ">= 0.92 x best fio into fresh fallocated files", ours,
                   lambda: self.fio("write", point, size, ("--end_fsync=1",)), rate=lambda g: g["job"]["write"]["bw_bytes"],
                   more=lambda runs: "; by each program's own clock, because filling memory with the pattern is not part of a store; "
                   f"whole processes from outside, filling included: {of_both_orders([outside(a) / outside(b) for a, b in runs]):.3f}",
                   before=clean)

    def codec(self, rw, point):
        """KV with and without `codec: exp4`, and fio, in turns that begin with another one each time."""
        size, model = self.args.size, "llama-3.1-8b"

        def cache(codec):
            return os.path.join(self.dir, f"cache-{codec}")

        def ours(codec, mode):
            return self.forebay("--rw", mode, "--model", model, "--tokens", PROMPT_TOKENS, "--size", size, "--codec", codec,
                                "--directory", cache(codec), "--keep")

        def clean():
            """As between the pairs of stores without a codec."""
            for codec in CODECS:
                remove(cache(codec))
            self.clean_written()
            time.sleep(5)

        mode, fio_extra = ("load", ()) if rw == "read" else ("store", ("--end_fsync=1",))
        if rw == "read":
            for codec in CODECS:
                ours(codec, "store")
        runs = {codec: lambda codec=codec: ours(codec, mode) for codec in CODECS} | {"fio": lambda: self.fio(rw, point, size, fio_extra)}
        got = {name: [] for name in runs}
        for i in range(self.args.pairs):
            if rw == "write":
                clean()
            names = list(runs)
            for name in names[i % 3 :] + names[: i % 3]:
                got[name].append(runs[name]())
                progress(f"codec, {mode} {i + 1}: {name} {got[name][-1]['job'][rw]['bw_bytes'] / 1e9:.3f} GB/s")
        clean()
        rates = {name: [g["job"][rw]["bw_bytes"] for g in of] for name, of in got.items()}
        cpu = {codec: [g["cpu"] / g["bytes"] for g in got[codec]] for codec in CODECS}

        def row(title, target, mine, theirs, detail):
            ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
            self.row(title, target, f"{statistics.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f}; {len(ratios)} pairs)", detail)

        def mid(values, unit):
            return f"{statistics.median(values):.2f} {unit}"

        target = {"load": (1.25, 1.2), "store": (1.2, 1.0)}[mode]
        row(f"{mode} with codec exp4, bytes of KV", f">= {target[0]} x without", rates["exp4"], rates["none"],
            f"{mid([r / 1e9 for r in rates['exp4']], 'GB/s')} against {mid([r / 1e9 for r in rates['none']], 'GB/s')}")
        row(f"{mode} with codec exp4 beside fio", f">= {target[1]} x best fio", rates["exp4"], rates["fio"],
            f"fio {mid([r / 1e9 for r in rates['fio']], 'GB/s')}")
        row(f"CPU of a {mode} with codec exp4", "<= 1.0 x without" if mode == "load" else "", cpu["exp4"], cpu["none"],
            f"{mid([c * 1e9 for c in cpu['exp4']], 's')} against {mid([c * 1e9 for c in cpu['none']], 's')} per GB of KV")

    def overlap(self):
        for model, tokens in (("llama-3.1-8b", 8192), ("deepseek-v3", 16384)):
            directory = os.path.join(self.dir, "cache-overlap")
            common = ("--rw", "layerload", "--model", model, "--tokens", tokens, "--size", 4 * GIB, "--directory", directory, "--keep")
            plain = self.forebay(*common, "--compute-us", 0)["job"]["forebay"]["load_ms"]
            for share in (0.25, 0.5, 1, 2, 4):
                found, shares = [], []
                for _ in range(max(5, self.args.pairs // 2)):
                    got = self.forebay(*common, "--compute-us", round(plain * 1000 / share / LAYERS[model]))["job"]["forebay"]
                    plain = got["load_ms"]
                    found.append(got["overlap_efficiency"])
                    shares.append(got["load_ms"] / got["compute_ms"])
                self.row(f"layerload, {model}, {tokens} tokens, T_load/T_compute {share}", ">= 0.95", f"{statistics.median(found):.3f}",
                         f"(max + min/L)/wall, {len(found)} runs of {4 * GIB // prompt_bytes(model, tokens)} loads, min {min(found):.3f}; "
                         f"T ratio met: {statistics.median(shares):.2f}")
            remove(directory)

    def fairness(self, cache, model):
        size = 8 * prompt_bytes(model, PROMPT_TOKENS)
        spreads = [self.forebay("--rw", "load", "--model", model, "--tokens", PROMPT_TOKENS, "--size", size, "--numjobs", 8, "--directory", cache,
                                "--keep")["job"]["forebay"]["load_spread"] for _ in range(9)]
        self.row("eight equal loads at once, slowest over fastest", "<= 1.5", f"{statistics.median(spreads):.2f}",
                 f"{len(spreads)} runs, max {max(spreads):.2f}")

    def mixed(self, point):
        # Of one job: the workers of forebay's would all begin at the start of the file. Its best
        # point, not the first two parts of another one's: with few small requests in flight,
        # forebay's threads for reads and for writes wake each other for each request.
        bs, depth, jobs = point
        size, seconds = self.args.size, 8
        mix = ("--rwmixread=80", f"--runtime={seconds}", "--time_based")
        self.pairs("reads beside a writer at 20 %", ">= 0.95 x fio's reads in the same mix",
                   lambda: self.forebay("--rw", "rw", "--rwmixread", 80, "--bs", bs, "--iodepth", depth, "--numjobs", jobs, "--direct", 1,
                                        "--size", size, "--runtime", seconds, "--time_based", "--filename", self.fio_file),
                   lambda: self.fio("rw", (bs, depth, jobs), size, mix),
                   rate=lambda g: g["job"]["read"]["bw_bytes"])

    def lookups(self):
        directory = os.path.join(self.dir, "lookup")
        got = [self.forebay("--rw", "lookup", "--tokens", 131072, "--entries", 1000000, "--directory", directory, "--keep")["job"]["forebay"]
               for _ in range(3)]
        mid = lambda key: statistics.median(g[key] for g in got)
        self.row("lookup of 128K tokens among a million other entries, p99", "<= 1000 us", f"{mid('lookup_us'):.0f} us",
                 f"matched {got[0]['matched_tokens']} tokens")
        self.row("the same with hashing, p99", "<= 2000 us", f"{mid('lookup_us') + mid('hash_us'):.0f} us", f"hashing {mid('hash_us'):.0f} us")

    def reopen(self):
        directory = os.path.join(self.dir, "reopen")
        for what, one_gone_of in (("", 0), (", a tenth of them given up before", 10)):
            got = []
            for _ in range(5):
                remove(directory)
                got.append(self.forebay("--rw", "reopen", "--chunks", 1000000, "--one-gone-of", one_gone_of, "--directory", directory,
                                        "--keep")["job"]["forebay"])
            times = sorted(g["reopen_ms"] for g in got)
            self.row(f"reopen of a million chunks{what} after kill -9, caches dropped, to the 10,000th correct lookup", "<= 300 ms",
                     f"{statistics.median(times):.0f} ms", f"{len(got)} runs, {times[0]:.0f} to {times[-1]:.0f}")
            self.row(f"memory of that process (PSS) per chunk{what}", "<= 120 bytes",
                     f"{statistics.median(g['bytes_per_chunk'] for g in got):.0f} bytes")

    # -- the page
    def write(self, path):
        """Puts the rows measured into the .json and the table of the .md beside it; other rows stay. Without a path they are printed."""
        commit = run(["git", "rev-parse", "--short", "HEAD"])["out"].strip()
        machine = (f"{cpu_name()}, {os.cpu_count()} cores, kernel {platform.release()}, {filesystem(self.dir)}, "
                   f"{run(['fio', '--version'])['out'].strip()}, {self.args.size / GIB:.0f} GiB a run")
        for row in self.rows.values():
            row.update(commit=commit, machine=machine)
        if path is None:
            print("\n".join(table(self.rows, self.notes)))
            return
        data = os.path.splitext(path)[0] + ".json"
        with open(data, encoding="utf-8") as kept:
            kept = json.load(kept)
        kept["rows"].update(self.rows)
        kept["notes"].update(self.notes)
        with open(data, "w", encoding="utf-8") as out:
            json.dump(kept, out, indent=1)
        with open(path, encoding="utf-8") as page:
            before, rest = page.read().split(BEGIN)
        with open(path, "w", encoding="utf-8") as out:
            out.write("\n".join([before + BEGIN, *table(kept["rows"], kept["notes"]), END + rest.split(END)[1]]))


def is_missed(target, figure):
    """Whether a figure, which begins with its number, is beyond its target, which begins with `<=` or `>=`, or is empty."""
    found = re.match(r"([<>])= ([\d.]+)", target)
    if not found:
        return False
    bound, value = float(found[2]), float(re.match(r"[\d.]+", figure)[0])
    return value > bound if found[1] == "<" else value < bound


def table(rows, notes):
    """The lines of the table."""
    lines = ["| what | target | measured | commit, day | |", "|---|---|---|---|---|"]
    for title, row in rows.items():
        missed = ", missed" if is_missed(row["target"], row["figure"]) else ""
        lines.append(f"| {title} | {row['target']} | **{row['figure']}**{missed} | {row.get('commit', '?')}, {row['date'][:10]} | {row['detail']} |")
    return [*lines, "", *(textwrap.fill(f"- {name}: {text}", 105, subsequent_indent="  ") for name, text in notes.items()), ""]


def prompt_bytes(model, tokens):
    """Bytes of KV of a prompt."""
    per_token = {"llama-3.1-8b": 32 * 2 * 8 * 128 * 2, "deepseek-v3": 61 * 576 * 2}[model]
    return per_token * tokens


def remove(directory):
    """Removes a tree; files first become one extent each, because a drive mounted with discard is told of each extent by itself."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            subprocess.run(["fallocate", "--zero-range", "-n", "-l", str(os.path.getsize(path)), path], capture_output=True, check=False)
    shutil.rmtree(directory, ignore_errors=True)


def of_both_orders(values):
    """Of runs or pairs in turn (A B B A ...): the geometric mean of the medians of either order.

    A drive may give half as much again to whichever of two stores comes second. The median of an odd number of pairs would then be
    a ratio of the more frequent order.
    """
    return math.sqrt(statistics.median(values[0::2]) * statistics.median(values[1::2] or values))


def fresh_fallocated(name, size):
    if os.path.exists(name):
        os.unlink(name)
    fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, size)
    os.close(fd)


def fill(name, size):
    """Real data, so that reads come from the drive and not from holes."""
    block = os.urandom(8 << 20)
    with open(name, "wb", buffering=0) as f:
        for _ in range(size // len(block)):
            f.write(block)
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def progress(text):
    print(text, file=sys.stderr, flush=True)


def cpu_name():
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        return next((line.split(":")[1].strip() for line in f if line.startswith("model name")), platform.machine())


def filesystem(path):
    return subprocess.run(["findmnt", "-no", "FSTYPE,OPTIONS", "-T", path], capture_output=True, text=True, check=False).stdout.strip()


HUGE_PAGES = "/proc/sys/vm/nr_hugepages"


def set_huge_pages(count):
    """Pages for fio's buffers; what was set before."""
    with open(HUGE_PAGES) as f:
        before = int(f.read())
    with open(HUGE_PAGES, "w") as f:
        f.write(str(count))
    return before


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forebay", default="target/release/forebay")
    parser.add_argument("--dir", help="work below this directory (default: the current one)", default=".")
    parser.add_argument("--size", type=int, default=8 * GIB, help="bytes moved by one run")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--sweep-runs", type=int, default=3)
    parser.add_argument("--only", help="comma-separated parts: loads,overlap,stores,mixed,codec,lookups,reopen")
    parser.add_argument("--write", help="put what was measured into the table of this page and into the .json beside it")
    args = parser.parse_args()
    parts = (args.only or "loads,overlap,stores,mixed,codec,lookups,reopen").split(",")
    directory = tempfile.mkdtemp(prefix="forebay-bench-", dir=args.dir)
    bench = Bench(args, directory)
    huge_pages = set_huge_pages(300)
    try:
        if {"loads", "mixed", "codec"} & set(parts):
            fill(bench.fio_file, args.size)
        read_point, of_one_job = bench.sweep("read", args.size // 4) if {"loads", "mixed", "codec"} & set(parts) else (None, None)
        write_point, _ = bench.sweep("write", args.size // 4) if {"stores", "codec"} & set(parts) else (None, None)
        if "loads" in parts:
            bench.loads(read_point)
        if "overlap" in parts:
            bench.overlap()
        if "stores" in parts:
            bench.stores(write_point)
        if "codec" in parts:
            bench.codec("read", read_point)
            bench.codec("write", write_point)
        if "mixed" in parts:
            bench.mixed(of_one_job)
        for part, measure in (("lookups", bench.lookups), ("reopen", bench.reopen)):
            if part in parts:
                measure()
    finally:
        set_huge_pages(huge_pages)
        try:
            # Also where a part failed: the parts before it took minutes.
            if bench.rows:
                bench.write(args.write)
        finally:
            progress("removing what was measured with")
            remove(directory)


if __name__ == "__main__":
    main()
