"""From a GGUF file of the Llama architecture to a model folder that any loader reads.

Owns the rules of that conversion: names, the order of rotary rows, the tokenizer's split rules. Dequantizes,
so that the folder holds plain bf16 weights. Knows nothing of serving, caches or where files come from.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

# Names of GGUF tensors, less the layer's prefix, and what transformers calls them.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# Token types of the GGUF format.
_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4


def convert(source: Path, folder: Path, *, console: Console) -> None:
    """Writes the model of a GGUF file of the Llama architecture to `folder`, which exists."""
    reader = GGUFReader(source)
    architecture = _value(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"{source} holds a model of architecture {architecture!r}, and this converts llama only"
        )
    config = build_config(reader)
    config.save_pretrained(folder)
    GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    build_tokenizer(reader).save_pretrained(folder)
    tensors = track(read_weights(reader), "Converting weights", total=len(reader.tensors), console=console)
    weights_file = folder / "model.safetensors"
    save_file(dict(tensors), weights_file, metadata={"format": "pt"})
    weights_file.chmod(0o644)


def build_config(reader: GGUFReader) -> LlamaConfig:
    """Builds the model's configuration. Nothing of the quantization stays in it: the weights are plain."""
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=_value(reader, "llama.vocab_size"),
        hidden_size=_value(reader, "llama.embedding_length"),
        intermediate_size=_value(reader, "llama.feed_forward_length"),
        num_hidden_layers=_value(reader, "llama.block_count"),
        num_attention_heads=_value(reader, "llama.attention.head_count"),
        num_key_value_heads=_value(reader, "llama.attention.head_count_kv"),
        head_dim=_value(reader, "llama.rope.dimension_count"),
        max_position_embeddings=_value(reader, "llama.context_length"),
        rms_norm_eps=_value(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": _value(reader, "llama.rope.freq_base")},
        bos_token_id=_value(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_value(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_value(reader, "tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )


def read_weights(reader: GGUFReader) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (transformers' name, bf16 tensor) of every tensor in the file."""
    heads = {
        "attn_q": _value(reader, "llama.attention.head_count"),
        "attn_k": _value(reader, "llama.attention.head_count_kv"),
    }
    for tensor in reader.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))  # fp32, [rows, columns]
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
            if part in heads:
                weight = _halves_from_pairs(weight, heads[part])
        else:
            name = f"{_MODEL_NAMES[stem]}.weight"
        yield name, weight.to(torch.bfloat16).contiguous()


def _halves_from_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    # GGUF orders the rows of a head so that rotary partners are neighbours: (0, 0'), (1, 1'), ...
    # transformers wants them half a head apart: 0, 1, ..., 0', 1', ...
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def build_tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Builds the tokenizer from the file's vocabulary, merges, special tokens and chat template.

    `tokenizer.ggml.pre = smollm` means that every digit is a piece of its own before the GPT-2 pattern is
    applied. transformers' own conversion leaves that step out, which changes the ids of numbers and of
    spaces before them.
    """
    pre = _value(reader, "tokenizer.ggml.pre")
    if pre != "smollm":
        raise ValueError(f"no rule for tokenizer.ggml.pre = {pre!r}; known: 'smollm'")
    texts: list[str] = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocab={text: i for i, text in enumerate(texts)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for text, kind in zip(texts, _value(reader, "tokenizer.ggml.token_type"), strict=True):
        if kind in (_CONTROL_TOKEN, _USER_DEFINED_TOKEN):
            tokenizer.add_tokens([AddedToken(text, normalized=False, special=kind == _CONTROL_TOKEN)])
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{role}_token": texts[_value(reader, f"tokenizer.ggml.{key}_token_id")]
        for role, key in roles.items()
    }
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        model_max_length=_value(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
        **special,
    )
    fast.chat_template = _value(reader, "tokenizer.chat_template")
    return fast


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no key {key}")
    return field.contents()
