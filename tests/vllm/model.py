"""Tiny models with random weights, made from a seed: enough for outputs that depend on every token, small enough for a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

VOCABULARY = 512


def tokenizer(folder: Path) -> None:
    """One token per byte, for the server's text interface."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"<x{i}>" for i in range(len(words), VOCABULARY)]
    made = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    pad, begin, end, unknown = special
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=begin, eos_token=end, unk_token=unknown
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)


#: Sizes that differ between the models: tests want small ones, a demonstration wants a prefill that
#: takes seconds.
SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "demo": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16},
    # As much KV for its size as models of today have.
    "speed": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8},
}


def llama(folder: Path, dtype: str, size: str = "tiny", seed: int = 1234) -> None:
    """Layers of full attention, KV heads of 64."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        **{"num_key_value_heads": 2} | SIZES[size],
        head_dim=64,
        max_position_embeddings=16384,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        # Large weights: the best token wins by far, so that rounding decides no output.
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer(folder)


#: Sliding window of the Gemma below, in tokens.
WINDOW = 64


def gemma(folder: Path, dtype: str, full: tuple[int, ...] = (1,), seed: int = 1234) -> None:
    """Gemma 3 with four layers of a sliding window, but those in `full`."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW,
        layer_types=["full_attention" if layer in full else "sliding_attention" for layer in range(4)],
        max_position_embeddings=16384,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    Gemma3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer(folder)


if __name__ == "__main__":
    path, dtype, *more = sys.argv[1:]
    if more[:1] == ["gemma"]:
        gemma(Path(path), dtype, () if more[1:] == ["window"] else (1,))
    else:
        llama(Path(path), dtype, *more)
