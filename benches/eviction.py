#!/usr/bin/env python3
"""Runs a request trace through eviction and admission policies, and writes the tables of docs/lab/eviction.md.

The simulated tables take a minute, those of the real log (--real) half an hour, in memory (--directory). Every figure follows
from the trace alone: the same commit gives the same table. Rows that are not run keep what docs/eviction.json has of them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time

PAGE, DATA = "docs/lab/eviction.md", "docs/eviction.json"
POLICIES = "fifo,lru,s3fifo,2q,arc,gdsf,lirs,sieve,prefix,optimum"
LOSSES = ("0.06", "0.13")
TIB = 1 << 40


def replay(args, *more):
    """One run of `forebay replay`: its rows."""
    argv = [args.forebay, "replay", args.trace, *more, "--json"]
    print(" ".join(argv), file=sys.stderr, flush=True)
    return json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)


def admission(args, memory, offer, policies, capacities):
    """Each drive and policy: what `all`, `second_touch` and `adaptive` with each loss find and write."""
    found = {}
    for loss in LOSSES:
        for row in replay(args, "--policy", policies, "--capacity-tokens", capacities, "--memory-tokens", memory, "--offer", offer,
                          "--admission", "all,second_touch,adaptive", "--admission-loss", loss):
            how = row["admission"] + (f" ({loss})" if row["admission"] == "adaptive" else "")
            drive = found.setdefault(f"{row['capacity_tokens'] // 1_000_000} M, {row['policy']}, {offer}", {})
            drive[how] = {"hit_ratio": round(row["hit_ratio"], 4), "tib": round(row["bytes_admitted"] / TIB, 1)}
    return found


def simulated(args):
    """The tables of policies for single chunks, without a log."""
    policies = {}
    for row in replay(args, "--policy", POLICIES, "--capacity-tokens", "3m,5m,10m,20m"):
        policies.setdefault(row["policy"], []).append(round(row["hit_ratio"], 4))
    above, alone = {}, {}
    for offer in ("stored", "finished", "evicted"):
        above |= admission(args, "3m", offer, "lru,prefix", "5m,20m")
    for offer in ("stored", "finished"):
        alone |= admission(args, "0", offer, "prefix", "3m,5m,10m,20m")
    return {"policies": policies, "admission below a memory of 3 M": above, "admission without a memory": alone}


def real(args):
    """The tables of the real log."""
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        def run(*more):
            rows = replay(args, "--engine", "real", "--directory", directory, *more)
            return [{"hit_ratio": round(row["hit_ratio"], 4), "write_amplification": round(row["write_amplification"], 3)} for row in rows]

        bound = ("--log-bytes", "2g", "--capacity-tokens", "3m,10m")
        return {
            "log": run("--capacity-tokens", "3m,10m,20m", "--policy", "prefix"),
            "restarts": {"none": run(*bound), "every 1000": run(*bound, "--restart-every", "1000"), "every 250": run(*bound, "--restart-every", "250")},
        }


def against(kept, cell):
    """A cell: hits and bytes, and both against `all`."""
    hits, bytes_ = cell["hit_ratio"] / kept["hit_ratio"] - 1, cell["tib"] / kept["tib"] - 1
    return f"{cell['hit_ratio']:.4f}, {cell['tib']} TiB ({hits:+.1%}, {bytes_:+.1%})"


def tables(data):
    """The lines of each table of the page, by its marker."""
    def made(name):
        return f"Commit {data[name]['commit']}, {data[name]['date']}.\n"

    rows = data["simulated"]["rows"]
    lines = [made("simulated"), "| Policy | 3 M tokens | 5 M | 10 M | 20 M |", "|---|---|---|---|---|"]
    for policy, hits in rows["policies"].items():
        lines.append(f"| {f'**{policy}**' if policy == 'prefix' else policy} | {' | '.join(f'{hit:.4f}' for hit in hits)} |")
    found = {"policies": lines}
    for key in ("admission below a memory of 3 M", "admission without a memory"):
        ways = ["all", "second_touch", *(f"adaptive ({loss})" for loss in LOSSES)]
        lines = [made("simulated"), f"| Drive, policy, offered | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
        for drive, cells in rows[key].items():
            whole = cells["all"]
            lines.append(f"| {drive} | {whole['hit_ratio']:.4f}, {whole['tib']} TiB | {' | '.join(against(whole, cells[way]) for way in ways[1:])} |")
        found[key] = lines
    rows = data["real"]["rows"]
    lines = [made("real"), "| | 3 M tokens | 10 M | 20 M |", "|---|---|---|---|"]
    lines.append(f"| hit ratio in the log | {' | '.join(format(row['hit_ratio'], '.4f') for row in rows['log'])} |")
    lines.append(f"| bytes written for each stored | {' | '.join(format(row['write_amplification'], '.3f') for row in rows['log'])} |")
    lines.append(f"| hit ratio, chunk by chunk, without a log | {' | '.join(format(data['simulated']['rows']['policies']['prefix'][i], '.4f') for i in (0, 2, 3))} |")
    found["log"] = lines
    lines = [made("real"), "| Restart | 3 M tokens | 10 M |", "|---|---|---|"]
    for name, cells in rows["restarts"].items():
        lines.append(f"| {name} | {' | '.join(format(row['hit_ratio'], '.4f') for row in cells)} |")
    found["restarts"] = lines
    return found


def write(data):
    """Puts the tables between their markers."""
    with open(PAGE, encoding="utf-8") as page:
        text = page.read()
    for name, lines in tables(data).items():
        begin, end = f"<!-- {name} begins -->\n", f"<!-- {name} ends -->"
        before, rest = text.split(begin)
        text = before + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1]
    with open(PAGE, "w", encoding="utf-8") as page:
        page.write(text)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("trace", help="requests, as Mooncake publishes them")
    p.add_argument("--forebay", default="target/release/forebay")
    p.add_argument("--real", action="store_true", help="the tables of the real log too")
    p.add_argument("--directory", default="/dev/shm", help="where the real log lies")
    args = p.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    with open(DATA, encoding="utf-8") as kept:
        data = json.load(kept)
    for name, measure in (("simulated", simulated), ("real", real)):
        if name == "simulated" or args.real:
            data[name] = {"commit": commit, "date": time.strftime("%Y-%m-%d"), "rows": measure(args)}
    with open(DATA, "w", encoding="utf-8") as out:
        json.dump(data, out, indent=1)
        out.write("\n")
    write(data)


if __name__ == "__main__":
    main()
