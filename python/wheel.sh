#!/usr/bin/env bash
# Builds the wheel: the extension module, and the `forebay` program beside it.
# Usage: wheel.sh PROFILE VENV OUT, where VENV has maturin.
set -euo pipefail
cd "$(dirname "$0")/.."
profile=$1 venv=$2 out=$3
# Cargo compiles each crate with the features that the selected packages ask for together. With the workspace and one of its
# tests, these are the ones of `cargo nextest run --workspace`: what that has built is not built again for the tests' wheel.
packages=(-p forebay-tools)
if [ "$profile" = dev ]; then packages=(--workspace --test tidy); fi
program=$("${CARGO:-cargo}" build --profile "$profile" --locked "${packages[@]}" --bin forebay --message-format json-render-diagnostics |
    sed -n 's|.*"executable":"\([^"]*/forebay\)".*|\1|p')
mkdir -p python/forebay.data/scripts
strip -o python/forebay.data/scripts/forebay "${program:?the program was not built}"
rm -rf "$out"
"$venv/bin/maturin" build --quiet --profile "$profile" --locked --manifest-path python/Cargo.toml --interpreter "$venv/bin/python" --out "$out"
