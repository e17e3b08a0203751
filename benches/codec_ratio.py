#!/usr/bin/env python3
"""What 4 bits for an exponent would make of the KV of a model: entropy, escapes, and the ratio of `exp4` (docs/format.md).

The KV is computed by transformers in bfloat16 from pages of the docs; float16 is the same KV converted. Run it with a Python that has
torch and transformers, as the one that tests/vllm/environment.py makes.

Usage: codec_ratio.py MODEL [--gguf FILE]
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

DOCS = Path(__file__).parent.parent
TEXTS = ("docs/eviction.md", "ARCHITECTURE.md", "docs/vllm.md")
#: Tokens of a text, and of an extent.
TOKENS, CHUNK = 2048, 256
PAGE, BLOCK, SEGMENT = 4096, 128, 128 * 128
#: By type: bits below the exponent, and of the exponent.
TYPES = {torch.bfloat16: (7, 8), torch.float16: (10, 5)}


def extents(model, tokenizer):
    """K and V of each layer and each `CHUNK` tokens, in the order in which an extent has them."""
    for name in TEXTS:
        text = (tokenizer.bos_token or "") + (DOCS / name).read_text()
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[:, :TOKENS]
        cache = DynamicCache()
        with torch.no_grad():
            loss = model(ids, past_key_values=cache, use_cache=True, labels=ids).loss
        print(f"{name}: {ids.shape[1]} tokens, loss {loss:.2f} a token")
        for layer in cache.layers:
            for at in range(0, ids.shape[1] - CHUNK + 1, CHUNK):
                yield [plane[0, :, at : at + CHUNK].transpose(0, 1).contiguous() for plane in (layer.keys, layer.values)]


def exponents(plane, dtype):
    below, bits = TYPES[dtype]
    return (plane.to(dtype).view(torch.int16).numpy().view(np.uint16).ravel() >> below) & ((1 << bits) - 1)


def entropy(values):
    share = np.bincount(values) / len(values)
    return -sum(p * np.log2(p) for p in share if p > 0)


def escapes(values, entries):
    """Values whose exponent is not among the most frequent ones of their segment."""
    of_segment = (np.bincount(values[at : at + SEGMENT]) for at in range(0, len(values), SEGMENT))
    return sum(int(counts.sum() - np.sort(counts)[-entries:].sum()) for counts in of_segment)


def windowed(planes):
    """Values outside the best window of 8 exponents of their channel (a head's element), and the number of channels."""
    escaped = channels = 0
    for plane in planes:
        values = exponents(plane, torch.bfloat16).reshape(plane.shape[0], -1)
        for column in values.T:
            counts = np.bincount(column, minlength=256)
            escaped += len(column) - int(np.convolve(counts, np.ones(8, dtype=int), "valid").max())
        channels += values.shape[1]
    return escaped, channels


def exp3(all_extents):
    """Prints what codes of 3 bits with a window for each channel would store, with the reserve that stores the least."""
    values = 2 * all_extents[0][0].numel()
    found = np.array([windowed(planes)[0] for planes in all_extents])
    channels = windowed(all_extents[0])[1]

    def stored(reserve):
        size = -(-(values * 11 // 8 + channels + 3 * reserve) // PAGE) * PAGE
        return np.where(found <= reserve, size, 2 * values)

    best = max(found, key=lambda reserve: -stored(reserve).sum())
    sizes = stored(best)
    share = found / values
    fit = (found <= best).sum()
    ratio = 2 * values * len(found) / sizes.sum()
    print(f"exp3: escapes {share.mean():.3%}, at most {share.max():.3%}; with room for {best / values:.3%} {fit} of {len(found)} extents fit")
    print(f"exp3: ratio {ratio:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--gguf", help="file of the model in it")
    args = parser.parse_args()
    source = {"pretrained_model_name_or_path": args.model} | ({"gguf_file": args.gguf} if args.gguf else {})
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16).eval()
    all_extents = list(extents(model, AutoTokenizer.from_pretrained(**source)))
    for dtype in TYPES:
        bits = [np.mean([entropy(exponents(planes[i], dtype)) for planes in all_extents]) for i in (0, 1)]
        print(f"{dtype}: {len(all_extents)} extents; entropy of the exponent {bits[0]:.2f} bits in K, {bits[1]:.2f} in V")
        coded = [np.concatenate([exponents(plane, dtype) for plane in planes]) for planes in all_extents]
        for code in (3, 4):
            found = np.array([escapes(values, 1 << code) / len(values) for values in coded])
            left = 16 - TYPES[dtype][1]
            ratio = 16 / (left + code + 24 * found.max())
            print(f"  codes of {code} bits: escapes {found.mean():.3%}, at most {found.max():.3%}; with room for these {ratio:.3f}")
    n = len(coded[0])
    blocks, segments = -(-n // BLOCK), -(-n // SEGMENT)
    size = -(-(192 * blocks + 20 * segments + 3 * -(-n // 1024)) // PAGE) * PAGE
    room = (size - 192 * blocks - 20 * segments) // 3
    fit = sum(escapes(np.concatenate([exponents(p, torch.bfloat16) for p in planes]), 16) <= room for planes in all_extents)
    print(f"exp4: {2 * n} bytes become {size}, ratio {2 * n / size:.3f}; {fit} of {len(all_extents)} extents fit")
    exp3(all_extents)


if __name__ == "__main__":
    main()
