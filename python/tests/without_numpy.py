"""A round trip with nothing but the standard library; run by test_process.py with numpy and torch blocked."""

import sys

import forebay

geometry = forebay.Geometry(model="m", layers=2, kv_heads=2, head_size=16, dtype="float32", fingerprint="plain")
shape = (2, 8, 16, 2, 16)
size = 2 * 8 * 16 * 2 * 16 * 4
source = [bytearray((i * 7 + layer) % 251 for i in range(size)) for layer in range(2)]
target = [bytearray(size) for _ in range(2)]
config = {"cache_dir": sys.argv[1], "chunk_size": 32, "capacity": "64MiB", "min_free": 0, "allow_any_filesystem": True}


def views(buffers: "list[bytearray]") -> "list[memoryview]":
    """The buffers in the shape of paged KV."""
    return [memoryview(b).cast("f", shape) for b in buffers]


with forebay.Engine(config, geometry) as engine:
    tokens, slots = list(range(64)), list(range(64))
    engine.store(tokens, views(source), slots, wait_for_staging=True).wait()
    result = engine.load(tokens, views(target), slots).wait()
half = size // 2
equal = all(
    s[p : p + 64 * 128] == t[p : p + 64 * 128] for s, t in zip(source, target, strict=True) for p in (0, half)
)
assert "numpy" not in sys.modules and "torch" not in sys.modules
print(f"{result.tokens} tokens, {'all equal' if equal else 'different'}")
