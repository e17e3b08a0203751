#!/usr/bin/env bash
# Builds the wheel (debug profile), installs it into a virtual environment under target/, and runs its tests there.
# PYTHON says which interpreter; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=target/venv-python
wheels=target/wheels-python
pins="maturin==1.16.0 pytest==9.2.0 numpy==2.2.6 pyflakes==4.1.0"

if [ "$(cat $venv/pins 2>/dev/null)" != "$pins" ]; then
    rm -rf $venv
    "$python" -m venv $venv
    # shellcheck disable=SC2086
    $venv/bin/pip install --quiet --disable-pip-version-check $pins
    echo "$pins" >$venv/pins
fi
# Names that do not exist fail only where they are used.
$venv/bin/python -m pyflakes python/forebay python/tests tests/vllm tests/lmcache tests/sglang tests/doors benches
python/wheel.sh dev $venv $wheels
$venv/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall $wheels/forebay-*.whl
# Not from python/, where the sources would shadow what is installed.
pytest=("$PWD/$venv/bin/python" -m pytest -q -p no:cacheprovider --rootdir python)
if [ $# -gt 0 ]; then exec "${pytest[@]}" "$@"; fi
"${pytest[@]}" python/tests --ignore python/tests/cuda
# The same package over GPU memory, with the stand-in for a driver.
standin=$("${CARGO:-cargo}" build --quiet --locked -p standin-cuda --message-format json |
    sed -n 's/.*"STANDIN_CUDA_DIR","\([^"]*\)".*/\1/p')
LD_LIBRARY_PATH="${standin:?the stand-in for libcuda.so.1 was not built}" "${pytest[@]}" python/tests/cuda
