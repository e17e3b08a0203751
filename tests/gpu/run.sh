#!/usr/bin/env bash
# Runs the device's tests on this machine's GPU, and says which of cuFile's ways (GDS, P2P, compat) work between it and a
# drive; where there is no GPU, on the stand-in, which shows that all of it runs. FOREBAY_TEST_DRIVE names a directory on
# the NVMe drive to test; without it the tests' own directory is used.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$(realpath "${1:?folder made by pack.sh}")
mkdir -p "$(cat "$dir/tmpdir")"
skip=()
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    export FOREBAY_TEST_GPU=1
    # cuFile is tried in a program of its own first.
    FOREBAY_PROGRAM="$dir/forebay"
    export FOREBAY_PROGRAM
    # A held stream must not share its way into the GPU with others.
    export CUDA_DEVICE_MAX_CONNECTIONS=32
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    # These ask the stand-in for what a driver does not tell, or hold streams that are not the server's.
    skip=(--skip a_launch_has_no_more_ctas --skip jobs_that_wait_become_one_launch
        --skip a_stream_that_waits_for_a_launch --skip a_gate_that_has_closed --skip a_launch_takes_no_job_along)
    if [ "$(nvidia-smi -L | grep -c GPU)" -lt 2 ]; then skip+=(--skip two_); fi
    "$dir/forebay" probe --json . || true
else
    echo "no GPU here: dry run on the stand-in"
fi
status=0
ran=0
ways=
for test in "$dir"/tests/*; do
    echo "== $(basename "$test")"
    # Each test in a process of its own, as device and stand-in are per process.
    names=$("$test" --list --format terse "${skip[@]}" | sed -n 's/: test$//p') || names=
    if [ -z "$names" ]; then
        echo "FAIL $(basename "$test"): it does not start, or has no tests"
        status=1
    fi
    for name in $names; do
        ran=$((ran + 1))
        if timeout 120 "$test" --exact "$name" --test-threads 1 --nocapture >"$dir/last.log" 2>&1; then
            echo "ok   $name"
            ways+=$(sed -n 's/^.*CUFILE \(cufile-.*\)$/  \1\\n/p' "$dir/last.log")
        else
            echo "FAIL $name"
            tail -30 "$dir/last.log"
            status=1
        fi
    done
done
if [ -n "${FOREBAY_TEST_GPU:-}" ] && command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        echo "== compute-sanitizer $tool"
        timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 9 "$dir/tests/cuda_reshape" --test-threads 1 "${skip[@]}" | tail -5 || status=1
    done
fi
# The Python package over this GPU's memory, with torch tensors where torch is installed.
rm -rf "$dir/site"
if "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$dir/wheels" --target "$dir/site" forebay pytest numpy; then
    driver=()
    if [ -z "${FOREBAY_TEST_GPU:-}" ]; then driver=(LD_LIBRARY_PATH="$dir/standin"); fi
    env "${driver[@]}" PYTHONPATH="$dir/site" "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider --rootdir "$dir/python-tests" "$dir/python-tests/cuda" || status=1
    ran=$((ran + 1))
else
    echo "FAIL the Python package could not be installed"
    status=1
fi
echo "cuFile's ways between the drive and the GPU:"
printf '%b' "$ways"
echo "$ran tests ran"
[ "$ran" -gt 0 ] || status=1
exit $status
