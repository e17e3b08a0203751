#!/usr/bin/env bash
# Builds what tests/gpu/run.sh and tests/gpu/bench.sh need on a machine without Rust, and puts it into the folder named.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?folder}
cargo=${CARGO:-cargo}
rm -rf "$out"
mkdir -p "$out/tests"
"$cargo" build --release --locked -p forebay-tools -p forebay-gpu-hook
cp target/release/forebay target/release/libforebay_gpu_hook.so "$out/"
for name in cuda_reshape cuda_order engine_cuda engine_memory engine_prefetch cufile_gpu; do
    "$cargo" test --locked -p forebay --test "$name" --no-run --message-format=json >"$out/build.json"
    built=$(python3 -c '
import json, sys
for line in open(sys.argv[2], encoding="utf-8"):
    message = json.loads(line)
    if message.get("executable") and message["target"]["name"] == sys.argv[1]:
        print(message["executable"])' "$name" "$out/build.json" | tail -1)
    cp "$built" "$out/tests/$name"
done
rm "$out/build.json"
strip --strip-debug "$out/forebay" "$out/libforebay_gpu_hook.so" "$out"/tests/*
# Tests make their caches below this path, which is compiled in.
echo "$PWD/target/tmp" >"$out/tmpdir"
# The stand-in, for dry runs.
standin=$(find target/debug/build -path '*standin-cuda-*/out/libcuda.so.1' -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2)
mkdir -p "$out/standin"
cp "$standin" "$out/standin/"
# The Python package, and pytest to run its tests with.
mkdir -p "$out/wheels"
"${MAKE:-make}" wheel
cp target/wheels/forebay-*.whl "$out/wheels/"
python3 -m pip download --quiet --disable-pip-version-check --only-binary :all: --dest "$out/wheels" pytest numpy
cp -r python/tests "$out/python-tests"
find "$out/python-tests" -name __pycache__ -prune -exec rm -r {} +
du -sh "$out"
