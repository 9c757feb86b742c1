"""A tokenizer of one token for each byte, and a tiny random model that has it: any text may come out."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

END = 2  # the end-of-text token
FIRST_BYTE = 3
VOCAB_SIZE = 272  # wider than the tokenizer, as those of real models are
SPECIAL_TOKENS = {"<pad>": 0, "<s>": 1, "</s>": END}


def tokenizer_json() -> bytes:
    """Its tokenizer.json."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = SPECIAL_TOKENS | {letter: FIRST_BYTE + index for index, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer.to_str().encode()


def save_model(folder: Path) -> Path:
    """Saves a model of two layers with the tokenizer."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=END,
    )
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    return folder
