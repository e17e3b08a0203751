#!/usr/bin/env bash
# Runs benches/gpu.py on this machine's GPU; where there is none, a dry run on the stand-in.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$(realpath "${1:?folder made by pack.sh}")
directory=${2:-.}
python=${PYTHON:-python3}
programs=(--forebay "$dir/forebay" --hook "$dir/libforebay_gpu_hook.so" --directory "$directory")
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    exec "$python" benches/gpu.py "${programs[@]}" "${@:3}"
fi
echo "no GPU here: dry run on the stand-in"
LD_LIBRARY_PATH="$dir/standin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "$python" benches/gpu.py --dry-run "${programs[@]}" "${@:3}"
