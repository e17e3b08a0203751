#!/usr/bin/env bash
# Runs the device's tests on this machine's GPU, and says which of cuFile's ways (GDS, P2P, compat) work between it and a
# drive; where there is no GPU, on the stand-in, which shows that all of it runs. FOREBAY_TEST_DRIVE names a directory on
# the NVMe drive to test; without it the tests' own directory is used.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$(realpath "${1:?folder made by pack.sh}")
mkdir -p "$(cat "$dir/tmpdir")"
# The Python package, which also knows where PyTorch's wheels have put libcufile.
python=${PYTHON:-python3}
status=0
rm -rf "$dir/site"
packages=(forebay)
for package in pytest numpy; do "$python" -c "import $package" 2>/dev/null || packages+=("$package"); done
"$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$dir/wheels" --target "$dir/site" "${packages[@]}" || status=1
skip=()
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    export FOREBAY_TEST_GPU=1
    # cuFile is tried in a program of its own first.
    FOREBAY_PROGRAM="$dir/forebay"
    export FOREBAY_PROGRAM
    # A held stream must not share its way into the GPU with others.
    export CUDA_DEVICE_MAX_CONNECTIONS=32
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    # These need no GPU, ask the stand-in for what a driver does not tell, or hold streams that are not the server's.
    skip=(--skip host:: --skip a_launch_has_no_more_ctas --skip jobs_that_wait_become_one_launch
        --skip a_stream_that_waits_for_a_launch --skip a_gate_that_has_closed --skip a_launch_takes_no_job_along
        --skip hits_of_a_load_layer_by_layer)
    if [ "$(nvidia-smi -L | grep -c GPU)" -lt 2 ]; then skip+=(--skip two_); fi
    FOREBAY_CUFILE_PATH=$(PYTHONPATH="$dir/site" "$python" -c 'import os, forebay; print(os.environ.get("FOREBAY_CUFILE_PATH", ""))' || true)
    export FOREBAY_CUFILE_PATH
    "$dir/forebay" probe --json . || true
else
    echo "no GPU here: dry run on the stand-in"
fi
ran=0
# Each test runs in a process of its own, as device and stand-in are per process; JOBS of them at a time.
jobs=${JOBS:-4}
logs=$dir/logs
rm -rf "$logs"
mkdir -p "$logs"
one() { # LOG TEST NAME
    if timeout 120 "$2" --exact "$3" --test-threads 1 --nocapture >"$1" 2>&1; then echo "ok   $3"; else echo "FAIL $3"; fi
}
export -f one
for test in "$dir"/tests/*; do
    file=$(basename "$test")
    echo "== $file"
    names=$("$test" --list --format terse "${skip[@]}" | sed -n 's/: test$//p') || names=
    if [ -z "$names" ]; then
        echo "FAIL $file: it does not start, or has no tests"
        status=1
        continue
    fi
    results=$(xargs -P "$jobs" -I NAME bash -c 'one "$0/$(basename "$1").NAME.log" "$1" NAME' "$logs" "$test" <<<"$names")
    ran=$((ran + $(wc -l <<<"$names")))
    sort <<<"$results"
    for name in $(sed -n 's/^FAIL //p' <<<"$results"); do
        echo "-- $name"
        tail -30 "$logs/$file.$name.log"
        status=1
    done
done
ways=$(sed -n 's/^.*CUFILE \(cufile-.*\)$/  \1/p' "$logs"/cufile_gpu.*.log)
if [ -n "${FOREBAY_TEST_GPU:-}" ] && command -v compute-sanitizer >/dev/null; then
    # Slower than without by far: some cases of each property are enough, the addresses are the same.
    sanitize() { # TOOL
        PROPTEST_CASES=4 timeout 120 compute-sanitizer --tool "$1" --error-exitcode 9 \
            "$dir/tests/cuda_reshape" --test-threads 1 "${skip[@]}" >"$logs/$1.log" 2>&1
    }
    sanitize memcheck & memcheck=$!
    sanitize racecheck & racecheck=$!
    for tool in memcheck racecheck; do
        if wait "${!tool}"; then lines=3; else lines=40 status=1; fi
        echo "== compute-sanitizer $tool"
        tail -"$lines" "$logs/$tool.log"
    done
fi
# The Python package over this GPU's memory, with torch tensors where torch is installed.
if [ -d "$dir/site/forebay" ]; then
    driver=()
    if [ -z "${FOREBAY_TEST_GPU:-}" ]; then driver=(LD_LIBRARY_PATH="$dir/standin"); fi
    env "${driver[@]}" PYTHONPATH="$dir/site" "$python" -m pytest -q -p no:cacheprovider --rootdir "$dir/python-tests" "$dir/python-tests/cuda" || status=1
    ran=$((ran + 1))
else
    echo "FAIL the Python package could not be installed"
    status=1
fi
echo "cuFile's ways between the drive and the GPU:"
echo "$ways"
echo "$ran tests ran"
[ "$ran" -gt 0 ] || status=1
exit $status
