#!/usr/bin/env bash
# Serves a model with SGLang over Forebay on a machine with a GPU, restarts it, and compares the answers to one long prompt: computed,
# loaded from the drive, and loaded again after kill -9. Never run yet: no such machine was at hand.
# Usage: sglang.sh MODEL DIRECTORY [hicache|linker], with SGLang 0.5.23 and forebay installed for `python`. DIRECTORY is on a local drive.
# The external linker takes models that docs/sglang.md names, such as those with DeepSeek's sparse attention.
set -euo pipefail
model=${1:?the model, a path or a name} directory=${2:?a directory on a local drive}
case ${3:-hicache} in
hicache) asked=() more=(--hicache-storage-prefetch-policy wait_complete) ;;
linker) asked=(--linker) more=() ;;
*) echo "$3: hicache or linker"; exit 2 ;;
esac
python=${PYTHON:-python} port=${PORT:-30123}
cache=$(mktemp -d "$directory/forebay-sglang-XXXXXX")
log=$cache.log
server=
stop() { [ -z "$server" ] || { kill "-$1" "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; server=; }; }
trap 'stop KILL; rm -rf "$cache"' EXIT

start() {
    eval "flags=($("$python" -m forebay.sglang "${asked[@]}" --cache-dir "$cache" --capacity 50GiB))"
    "$python" -m sglang.launch_server --model-path "$model" --page-size 64 --port "$port" --disable-cuda-graph \
        "${more[@]}" "${flags[@]}" >>"$log" 2>&1 &
    server=$!
    for _ in $(seq 600); do
        if curl -sf "http://127.0.0.1:$port/health" >/dev/null; then return; fi
        kill -0 "$server" || { tail -50 "$log"; exit 1; }
        sleep 1
    done
    echo "the server did not start, see $log"; exit 1
}

ask() {
    "$python" - "$port" <<'PY'
import json, sys, urllib.request
text = " ".join(f"Item {n} of the list costs {n * 7 % 1000} coins." for n in range(600)) + " What does item 17 cost?"
body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 64}}
request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=600))
print(answer["text"].replace("\n", " "))
print("cached tokens:", answer["meta_info"].get("cached_tokens"), file=sys.stderr)
PY
}

start; computed=$(ask); sleep 10; stop TERM
start; loaded=$(ask); stop KILL
start; again=$(ask); stop TERM
printf 'computed: %s\nloaded:   %s\nagain:    %s\n' "$computed" "$loaded" "$again"
if [ "$computed" = "$loaded" ] && [ "$computed" = "$again" ]; then echo "the answers are the same"; else echo "THE ANSWERS DIFFER"; exit 1; fi
