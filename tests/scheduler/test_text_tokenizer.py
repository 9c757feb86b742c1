"""Text becomes the token ids that the tokenizers library and transformers give."""

import json

import pytest
from sample_tokenizers import KINDS, TEXTS, demo_folder, demo_is_installed, library_tokenizer, tokenizer_json

from scheduler_service.text.tokenizer import TextTokenizer, TokenizerError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("add_special_tokens", [False, True])
async def test_encode_and_decode_agree_with_the_library(kind, add_special_tokens):
    library, tokenizer = library_tokenizer(kind), TextTokenizer(tokenizer_json(kind))
    for text in TEXTS:
        ids = await tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert ids == library.encode(text, add_special_tokens=add_special_tokens).ids
        for skip in (False, True):
            assert await tokenizer.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip)


@pytest.mark.skipif(not demo_is_installed(), reason="the demo model is not installed")
async def test_special_tokens_are_handled_as_in_transformers():
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(demo_folder())
    tokenizer = TextTokenizer((demo_folder() / "tokenizer.json").read_bytes())
    for text in [*TEXTS, "<|endoftext|>x<|im_end|> y", "<|im_start|>assistant\nOK<|im_end|>"]:
        for special in (False, True):
            ids = await tokenizer.encode(text, add_special_tokens=special)
            assert ids == reference(text, add_special_tokens=special)["input_ids"]
            assert await tokenizer.decode(ids, skip_special_tokens=special) == reference.decode(
                ids, skip_special_tokens=special
            )


async def test_a_long_text_gives_the_same_ids_from_a_thread():
    text = "\n".join(TEXTS) * 20
    ids = await TextTokenizer(tokenizer_json("byte_level")).encode(text, add_special_tokens=True)
    assert ids == library_tokenizer("byte_level").encode(text).ids


async def test_truncation_and_padding_of_a_saved_tokenizer_are_ignored():
    library = library_tokenizer("byte_level")
    library.enable_truncation(4)
    library.enable_padding(length=100)
    ids = await TextTokenizer(library.to_str().encode()).encode(TEXTS[0], add_special_tokens=True)
    assert ids == library_tokenizer("byte_level").encode(TEXTS[0]).ids


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_the_text_of_one_token_keeps_its_space(kind):
    library, tokenizer = library_tokenizer(kind), TextTokenizer(tokenizer_json(kind))
    ids = library.encode("over the", add_special_tokens=False).ids
    assert "".join(map(tokenizer.token_text, ids)).endswith(" the")


def test_the_text_of_part_of_a_character_is_a_replacement_character():
    library, tokenizer = library_tokenizer("byte_level"), TextTokenizer(tokenizer_json("byte_level"))
    assert tokenizer.token_text(library.encode("🦖").ids[0]) == "\ufffd"


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", json.dumps({"model": None}).encode()])
def test_bytes_that_are_no_tokenizer_are_refused(content):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        TextTokenizer(content)
