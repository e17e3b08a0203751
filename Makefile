# Two commands do everything: `make demo` and `make test`. The rest are parts of them, or benches that take long.
CARGO ?= cargo
PYTHON ?= python3
# Of gigabytes of wheels one broken download must not end a build.
export PIP_RETRIES ?= 10
export PIP_DEFAULT_TIMEOUT ?= 60
# vLLM's and SGLang's thousands of modules are compiled once, not by each of their processes: also where PYTHONDONTWRITEBYTECODE
# is set, as in many containers. Their packages come without bytecode, and the checkout stays clean.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/target/pycache
FOREBAY := target/release/forebay
CUFILE_LIB := target/cufile/libcufile.path

.PHONY: environments doors vllm-gpu codec-proof demo test build lint unit doc python wheel vllm-ci vllm-test vllm-harness vllm-demo lmcache-ci lmcache-test comparison bench-lmcache sglang-ci sglang-test sglang-server sglang-gpu cufile check-abi bench charts figures micro kernels kernels-check fuzz miri sanitize loom soak shutdown mutants gpu-pack test-gpu bench-gpu package clean overlap blend-quality blend-speed remote-faults vllm-s3

build:
	$(CARGO) build --release --locked -p forebay-tools

# Builds, runs the request trace through the real engine in a temporary directory, verifies every byte, shows the figures.
demo: build
	$(FOREBAY) demo

# Everything CI runs. What NVIDIA's wheels are needed for is named at the end where they could not be fetched.
# Gigabytes of wheels are fetched while the Rust tests are built.
test:
	@mkdir -p target && { $(MAKE) environments > target/environments.log 2>&1 & made=$$!; trap 'kill $$made' INT TERM; \
		{ $(MAKE) lint unit doc || { kill $$made; exit 1; }; } && { wait $$made || { cat target/environments.log; exit 1; }; }; } && \
		$(MAKE) python lmcache-ci sglang-ci vllm-harness vllm-ci kernels-check
	@test -s $(CUFILE_LIB) || echo 'NOT TESTED HERE: NVIDIA'"'"'s own libcufile; its wheels could not be fetched'

# `cargo fmt` does not see the modules that a macro declares.
lint:
	$(CARGO) fmt --all --check
	rustfmt --edition 2024 --check $$(find src -name '*.rs')
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) clippy -p forebay-python --locked -- -D warnings
	$(PYTHON) benches/figures.py --check > /dev/null

# Documentation tests of everything at once, for which nothing is compiled anew; the loom models have a copy of the index module under another name.
unit: cufile
	FOREBAY_CUFILE_PATH="$$(cat $(CUFILE_LIB) 2>/dev/null)" $(CARGO) nextest run --workspace --locked --no-fail-fast --test-threads $$(($$(nproc) + 2))
	$(CARGO) test --doc --workspace --locked -- --skip tests/loom

# The public API alone: its pages must not link to what is not in it, and it stays small. Then all pages, with the modules below it.
doc:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc -p forebay --no-deps --locked
	@items=$$(grep -o '<li><a href="[a-z]' target/doc/forebay/all.html | wc -l); echo "$$items public items"; test $$items -le 150
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked

# The Python package: builds the wheel, installs it into a virtual environment of its own and runs its tests there.
python:
	PYTHON="$(PYTHON)" python/test.sh

# The real libcufile, from NVIDIA's Python wheels; tests use it where it could be fetched.
cufile:
	$(PYTHON) cufile-sys/fetch_wheel.py target/cufile

# The bindings against NVIDIA's header and library at every version that changed them; part of `unit` where those can be fetched.
check-abi:
	$(PYTHON) cufile-sys/fetch_wheel.py target/cufile --require
	FOREBAY_CHECK_ABI=required $(CARGO) test -p forebay-cufile-sys --locked --test check_abi -- --nocapture

# The kernels' PTX from their sources, by NVIDIA's compiler from its Python wheel (kernels/README.md).
kernels:
	$(PYTHON) kernels/build.py

# Whether the checked-in PTX is what the sources give, and assembles for every GPU; skipped where the wheels cannot be fetched.
kernels-check:
	$(PYTHON) kernels/build.py --check

# The codec over a thousand million values, and its decoder over ten million inputs: minutes.
codec-proof:
	CARGO_PROFILE_RELEASE_LTO=off $(CARGO) test --release -p forebay --lib a_thousand_million -- --ignored --nocapture
	CARGO_PROFILE_RELEASE_LTO=off FOREBAY_FUZZ_TARGET=coded_extent FOREBAY_FUZZ_RUNS=10000000 $(CARGO) test --release -p forebay-fuzz --test corpus -- --nocapture

# Fuzzing with libFuzzer and the address sanitizer, FUZZ_RUNS inputs per target: needs a nightly toolchain and `cargo install cargo-fuzz`. What
# it finds new is added to the corpus. `unit` runs the same targets over that corpus, and over some thousand inputs made from it.
FUZZ_RUNS ?= 1000000
FUZZ_TARGETS ?= $(shell $(CARGO) +nightly fuzz list)
fuzz:
	for target in $(FUZZ_TARGETS); do \
		CARGO_PROFILE_RELEASE_LTO=off $(CARGO) +nightly fuzz run --features libfuzzer $$target -- -runs=$(FUZZ_RUNS) -max_len=12288 -timeout=10 -print_final_stats=1 || exit 1; \
	done

# Two processes over one cache, one of them killed now and then, for half an hour; every byte that is loaded is checked. Memory, descriptors,
# threads and bytes on the drive must stay where they are. `unit` runs the same for seconds. As root it runs on a loop device.
SOAK_SECONDS ?= 1800
soak:
	FOREBAY_SOAK_SECONDS=$(SOAK_SECONDS) FOREBAY_SOAK_JSON="$$(pwd)/target/soak.json" CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true \
		$(CARGO) test --release --locked -p forebay --test proof_soak -- --nocapture

# The remote tier over a real S3 server that spoils requests at random, until so many are spoiled. `unit` runs 60.
REMOTE_FAULTS ?= 10000
remote-faults:
	FOREBAY_REMOTE_FAULTS=$(REMOTE_FAULTS) $(CARGO) test --locked -p forebay --test engine_remote faults_at_random -- --nocapture

# ext4 and XFS on a loop device, shut down under a working log: needs root and mkfs.xfs. `unit` runs three of each where it can.
SHUTDOWN_CYCLES ?= 300
shutdown:
	FOREBAY_SHUTDOWN_CYCLES=$(SHUTDOWN_CYCLES) $(CARGO) test --locked -p forebay --test proof_shutdown -- --nocapture --test-threads=1

# Undefined behaviour and data races in the modules with `unsafe` and in the format, by Miri: needs a nightly toolchain with the components miri and
# rust-src. Then the tests with threads once more, with other orders of the threads for each of MIRI_SEEDS.
MIRI_SEEDS ?= 0..8
MIRI_FLAGS := -Zmiri-disable-isolation -Zmiri-permissive-provenance
MIRI = PROPTEST_CASES=4 $(CARGO) +nightly miri test -p forebay --locked --lib --
miri:
	MIRIFLAGS="$(MIRI_FLAGS)" $(MIRI) format:: paged:: geometry:: io::buffer \
		device::host device::memory device::staging device::region device::gate device::rope device::parts
	MIRIFLAGS="$(MIRI_FLAGS)" $(MIRI) index:: --skip index::policy
	MIRIFLAGS="$(MIRI_FLAGS) -Zmiri-many-seeds=$(MIRI_SEEDS)" $(MIRI) readers_never_see a_leased_segment_is_never threads_never_share

# The tests of the modules with `unsafe` once more, compiled with LLVM's address sanitizer and its thread sanitizer: needs a nightly toolchain with
# rust-src. Leaks are not looked for: what a hung call may still write, or a forked child has, is left alone by design, and tests leak names. The
# tests of the guard that the sanitizers' own handlers and models of `mmap` get in the way of are left out.
SANITIZE = $(CARGO) +nightly nextest run --locked --target x86_64-unknown-linux-gnu -p forebay --lib --no-fail-fast
sanitize:
	RUSTFLAGS=-Zsanitizer=address ASAN_OPTIONS=detect_leaks=0 $(SANITIZE) --target-dir target/asan --test 'io_*' --test 'paged_*' --test 'cuda_*' \
		--test 'engine_*' --test 'objects_*' --test 'connector_*' --test format_v3 -E 'not test(ends_the_process_as_ever)'
	RUSTFLAGS=-Zsanitizer=thread $(SANITIZE) --target-dir target/tsan -Zbuild-std --test 'paged_*' --test engine_roundtrip --test engine_faults \
		--test 'objects_*' --test 'connector_*' -E 'not test(ends_the_process_as_ever) - test(lose_a_mapping_at_once)'

# The models of the index module's interleavings with more preemptions than `unit` has time for.
LOOM_MAX_PREEMPTIONS ?= 4
loom:
	LOOM_MAX_PREEMPTIONS=$(LOOM_MAX_PREEMPTIONS) $(CARGO) test -p forebay-loom --locked --lib -- models --nocapture

# Changes one place at a time and expects the tests to notice; takes two hours.
mutants:
	status=0; \
	$(PYTHON) tests/mutants/run.py tests/mutants/kernels.json --update kernels/README.md || status=1; \
	$(PYTHON) tests/mutants/run.py tests/mutants/device.json --update tests/mutants/README.md || status=1; \
	$(PYTHON) tests/mutants/run.py tests/mutants/log.json --update tests/mutants/README.md || status=1; \
	$(PYTHON) tests/mutants/run.py tests/mutants/tier.json --update tests/mutants/README.md || status=1; \
	$(PYTHON) tests/mutants/run.py tests/mutants/blend.json --update tests/mutants/README.md || status=1; \
	$(PYTHON) tests/mutants/run.py tests/mutants/objects.json --update tests/mutants/README.md || status=1; \
	exit $$status

# Speed against fio on this machine; writes docs/benchmarks.md. Needs root, fio and about an hour.
bench: build
	$(PYTHON) benches/speed.py --forebay $(FOREBAY) --write docs/benchmarks.md

# The charts of the docs from their committed figures.
charts:
	test -d target/charts || $(PYTHON) -m venv target/charts
	target/charts/bin/pip install --quiet matplotlib==3.10.9
	target/charts/bin/python benches/charts.py

# Figures of the docs that are older than what they measure.
figures:
	$(PYTHON) benches/figures.py

# The Python wheel for users, with optimisation, into target/wheels.
wheel:
	$(PYTHON) -m venv target/venv-wheel
	target/venv-wheel/bin/pip install --quiet --disable-pip-version-check maturin==1.16.0
	python/wheel.sh release target/venv-wheel target/wheels

# Real vLLM on this machine's CPU, with the wheel that python/test.sh has built. Its environment (906 MB to fetch) is made outside the
# checkout and used again; where it cannot be made these fail. `vllm-ci` is the share that `make test` runs.
VLLM = $(PYTHON) tests/vllm/environment.py $$(ls target/wheels-python/forebay-*.whl)
LMCACHE = $(PYTHON) tests/lmcache/prepare.py $$(ls target/wheels-python/forebay-*.whl)
LMCACHE_VERSIONS ?= 0.5.6 0.5.7rc2
SGLANG = $(PYTHON) tests/sglang/prepare.py $$(ls target/wheels-python/forebay-*.whl)
# In two processes, because a vLLM that starts keeps one core busy: in one alone these files, in the other all the others.
VLLM_FIRST = test_warm.py test_server.py test_prefetch.py
vllm-ci: export OMP_NUM_THREADS = 1
vllm-ci: python
	python=$$($(VLLM)) && cd tests/vllm && { $$python -m pytest -q -s --durations=10 -m ci $(VLLM_FIRST) & first=$$!; trap 'kill $$first' INT TERM; \
		$$python -m pytest -q -s --durations=10 -m ci $(addprefix --ignore=,$(VLLM_FIRST)); second=$$?; wait $$first && exit $$second; }

vllm-test: python
	python=$$($(VLLM)) && cd tests/vllm && $$python -m pytest -q -s --durations=30

# Real vLLM over the S3 server of the tests.
vllm-s3: python
	$(CARGO) build --locked -p forebay --example s3-server
	python=$$($(VLLM)) && cd tests/vllm && FOREBAY_S3_SERVER=$(CURDIR)/target/debug/examples/s3-server $$python -m pytest -q -s test_s3.py

# What blending costs in quality, on SmolLM2-135M-Instruct: writes the tables of docs/blend.md. ONLY=quality, ten minutes on two quiet cores, or
# ONLY=recall, twenty beside other work, measures one of them.
blend-quality: python
	python=$$($(VLLM)) && $$python tests/vllm/blend_quality.py --write $(if $(ONLY),--only $(ONLY))

# The environments of vLLM, LMCache and SGLang, before there is a wheel of Forebay for them.
environments:
	$(PYTHON) tests/vllm/environment.py
	$(PYTHON) tests/lmcache/prepare.py
	$(PYTHON) tests/lmcache/prepare.py --suite
	$(PYTHON) tests/sglang/prepare.py

# vLLM's schedulers, of 0.32 and 0.33 at once, around a runner that knows every byte of KV. Each version has half of the seeds;
# with HARNESS_SEEDS=0..1000 both have all of these.
vllm-harness: python
	python=$$($(VLLM)) && cd tests/vllm && { FOREBAY_HARNESS_SEEDS=$(or $(HARNESS_SEEDS),0..18) $$python -m pytest -q harness --vllm 0.32 & first=$$!; trap 'kill $$first' INT TERM; \
		FOREBAY_HARNESS_SEEDS=$(or $(HARNESS_SEEDS),18..36) $$python -m pytest -q harness --vllm 0.33; second=$$?; wait $$first && exit $$second; }

# LMCache's own server and tools over Forebay (docs/lmcache.md). `lmcache-ci` is the part of `make test`: two to three minutes.
lmcache-ci: python
	python=$$($(LMCACHE)) && cd tests/lmcache && $$python -m pytest -q --durations=5 -m ci

lmcache-test: python
	for version in $(LMCACHE_VERSIONS); do \
		python=$$($(LMCACHE) --lmcache $$version) && (cd tests/lmcache && $$python -m pytest -q --durations=10) || exit 1; done

# Forebay beside what LMCache, vLLM and SGLang have for files, from their packages; writes docs/comparison.md. Needs root.
# ONLY=faults needs no quiet machine, ONLY=speed does. `bench-lmcache` is LMCache's part of the speeds, printed only. DIRECTORY is on the drive.
COMPARE = $(PYTHON) tests/lmcache/prepare.py --lmcache 0.5.7rc2 --sglang $$(ls target/wheels/forebay-*.whl)
ROUNDS ?= 7
comparison: wheel
	python=$$($(COMPARE)) && $$python benches/comparison/run.py --rounds $(ROUNDS) $(if $(ONLY),--only $(ONLY)) $(DIRECTORY)

bench-lmcache: wheel
	python=$$($(COMPARE)) && $$python benches/comparison/run.py --rounds $(ROUNDS) --speed forebay forebay-direct forebay-native lmcache-fs lmcache-raw_block -- $(DIRECTORY)

# Layer-wise loading beside whole-request loading in real vLLM on a CPU, printed only. DIRECTORY is on the drive.
OVERLAP_ROUNDS ?= 5
overlap: wheel
	python=$$($(PYTHON) tests/vllm/environment.py $$(ls target/wheels/forebay-*.whl)) && \
		PYTHONPATH=tests/vllm $$python benches/overlap.py --rounds $(OVERLAP_ROUNDS) --folder $(DIRECTORY)

# Time to the first token of blended requests in real vLLM on a CPU, printed only. DIRECTORY is on the drive.
BLEND_ROUNDS ?= 5
blend-speed: wheel
	python=$$($(PYTHON) tests/vllm/environment.py $$(ls target/wheels/forebay-*.whl)) && \
		$$python benches/blend.py --rounds $(BLEND_ROUNDS) --folder $(DIRECTORY)

# SGLang's pools, tree and cache controller on CPU tensors over Forebay (docs/sglang.md). `sglang-ci` is the part of `make test`: two minutes.
sglang-ci: python
	python=$$($(SGLANG)) && cd tests/sglang && $$python -m pytest -q --durations=5 -m ci

sglang-test: python
	python=$$($(SGLANG)) && cd tests/sglang && $$python -m pytest -q --durations=10

# vLLM's connector, LMCache's adapter and SGLang's HiCache in one cache directory at once, each in its own environment.
doors: python
	vllm=$$($(VLLM)) && lmcache=$$($(LMCACHE)) && sglang=$$($(SGLANG)) && PYTHON_OF_VLLM=$$vllm PYTHON_OF_LMCACHE=$$lmcache \
		PYTHON_OF_SGLANG=$$sglang target/venv-python/bin/python -m pytest -q -p no:cacheprovider tests/doors

# Real SGLang without a GPU, with all of its processes: answers of KV that HiCache loads, after a
# restart, kill -9 and damage. What is stood in for is named in tests/sglang/on_cpu/sitecustomize.py.
# Needs a C++ compiler and OpenSSL's headers for SGLang's hash of pages, and some minutes.
sglang-server: python
	python=$$($(SGLANG)) && $$python tests/gpu/serve_sglang.py --device cpu --drive target --out target/sglang-server \
		--parts same,restart,killed,damage --beside 1 --limit 300

# Real SGLang on this machine's GPU: answers of KV that HiCache loads, after a restart, kill -9 and damage. `python` has SGLang and Forebay;
# SGLANG_PARTS are those that `python tests/gpu/serve_sglang.py --help` names.
SGLANG_PARTS ?= same,restart,killed,damage
sglang-gpu:
	python tests/gpu/serve_sglang.py --drive "$(DIRECTORY)" --out target/sglang-gpu --parts $(SGLANG_PARTS)

# Real vLLM on this machine's GPU: answers of loaded KV after restarts, kills and damage, and times to the first token. `python` has vLLM and
# Forebay; PARTS are those that `python tests/gpu/serve_vllm.py --help` names.
PARTS ?= same,restart,damage,killed,layerwise,memory,prefetch,server,drive,ram,overlap,blend
vllm-gpu:
	python tests/gpu/serve_vllm.py --drive "$(DIRECTORY)" --out target/vllm-gpu --parts $(PARTS)

# vLLM's server on a small model with Forebay: a long prompt, a restart, the same prompt; times to the first token.
vllm-demo: python
	python=$$($(VLLM)) && $$python tests/vllm/demo.py

# What a GPU machine needs, in target/gpu: programs and tests without debug information, which run there without Rust.
gpu-pack:
	CARGO="$(CARGO)" tests/gpu/pack.sh target/gpu

# The device's tests on this machine's GPU, from target/gpu; without a GPU a dry run on the stand-in.
test-gpu:
	test -d target/gpu || $(MAKE) gpu-pack
	tests/gpu/run.sh target/gpu

# Speed on this machine's GPU; writes docs/benchmarks-gpu.md. Without a GPU a dry run on the stand-in. DIRECTORY is on the drive.
DIRECTORY ?= .
bench-gpu:
	test -d target/gpu || $(MAKE) gpu-pack
	tests/gpu/bench.sh target/gpu $(DIRECTORY)

# The two crates of the library as a registry would get them, each built from its package alone.
package:
	$(CARGO) package --locked -p forebay-cufile-sys -p forebay

micro:
	$(CARGO) bench -p forebay

clean:
	$(CARGO) clean
