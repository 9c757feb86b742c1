"""Incremental detokenization gives exactly what decoding the whole output gives, however it is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_tokenizers import KINDS, TEXTS, demo_folder, demo_is_installed, library_tokenizer, tokenizer_json
from tokenizers import Tokenizer

from scheduler_service.text.tokenizer import TextTokenizer


def pieces(tokenizer: TextTokenizer, token_ids, cuts=1, skip_special_tokens=True):
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    parts = []
    while token_ids:
        parts.append(detokenizer.feed(token_ids[:cuts]))
        token_ids = token_ids[cuts:]
    return [*parts, detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_ids_join_to_the_whole_decode(kind, data):
    library, tokenizer = library_tokenizer(kind), TextTokenizer(tokenizer_json(kind))
    size = library.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=60))
    cuts = data.draw(st.integers(1, 7))
    skip = data.draw(st.booleans())
    assert "".join(pieces(tokenizer, ids, cuts, skip)) == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_fallback_no_strip"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_byte_tokens_join_to_the_whole_decode(kind, data):
    library, tokenizer = library_tokenizer(kind), TextTokenizer(tokenizer_json(kind))
    words = [library.token_to_id(token) for token in ("▁", "a", "▁the", "</s>") if library.token_to_id(token)]
    words.append(library.get_vocab_size())  # has no token
    byte = st.sampled_from(
        [library.token_to_id(f"<0x{b:02X}>") for b in (0x0A, 0x20, 0xE4, 0xBD, 0xA0, 0x80)]
    )
    ids = data.draw(st.lists(st.one_of(byte, st.sampled_from(words)), max_size=30))
    assert "".join(pieces(tokenizer, ids)) == library.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_texts_join_to_the_whole_decode(kind, text):
    library, tokenizer = library_tokenizer(kind), TextTokenizer(tokenizer_json(kind))
    ids = library.encode(text).ids
    assert "".join(pieces(tokenizer, ids)) == library.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_no_strip"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_character_is_never_sent_in_parts(kind, text):
    library, tokenizer = library_tokenizer(kind), TextTokenizer(tokenizer_json(kind))
    ids = library.encode(text, add_special_tokens=False).ids
    whole = library.decode(ids, skip_special_tokens=False)
    assert "\ufffd" not in whole  # or the case would prove nothing
    parts = pieces(tokenizer, ids, skip_special_tokens=False)
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) == whole


def test_bytes_that_stay_incomplete_are_flushed_as_replacement_characters():
    library, tokenizer = library_tokenizer("byte_level"), TextTokenizer(tokenizer_json("byte_level"))
    ids = library.encode("ok 🦖").ids[:-1]
    parts = pieces(tokenizer, ids)
    assert "".join(parts[:-1]) == "ok "
    assert parts[-1] == "\ufffd"


def test_a_space_after_a_skipped_special_token_is_kept():
    library, tokenizer = library_tokenizer("byte_fallback"), TextTokenizer(tokenizer_json("byte_fallback"))
    ids = [*library.encode("the fox").ids, library.token_to_id("</s>"), *library.encode("the dog").ids]
    assert "".join(pieces(tokenizer, ids)) == "the fox the dog"


def test_a_byte_run_is_pending_while_it_is_whole_and_withheld_while_it_is_not():
    library, tokenizer = library_tokenizer("byte_fallback"), TextTokenizer(tokenizer_json("byte_fallback"))
    ids = [library.token_to_id(f"<0x{byte:02X}>") for byte in "你".encode()]
    detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
    seen = [(detokenizer.feed([token_id]), detokenizer.pending()) for token_id in ids]
    assert seen == [("", ""), ("", ""), ("", "你")]
    assert detokenizer.feed([library.token_to_id("a")]) == "你a"


@pytest.fixture(scope="module")
def demo_json() -> bytes:
    if not demo_is_installed():
        pytest.skip("the demo model is not installed")
    return (demo_folder() / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def demo_library(demo_json):
    return Tokenizer.from_buffer(demo_json)


@pytest.fixture(scope="module")
def demo_tokenizer(demo_json):
    return TextTokenizer(demo_json)


@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_tokenizer_on_texts(demo_library, demo_tokenizer, text):
    ids = demo_library.encode(text).ids
    assert "".join(pieces(demo_tokenizer, ids, skip_special_tokens=False)) == text
    assert "".join(pieces(demo_tokenizer, ids)) == demo_library.decode(ids)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 49_160), max_size=80), cuts=st.integers(1, 9))
def test_the_demo_tokenizer_on_random_ids(demo_library, demo_tokenizer, ids, cuts):
    assert "".join(pieces(demo_tokenizer, ids, cuts)) == demo_library.decode(ids)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_the_demo_tokenizer_on_random_texts(demo_library, demo_tokenizer, text):
    ids = demo_library.encode(text).ids
    whole = demo_library.decode(ids, skip_special_tokens=False)
    parts = pieces(demo_tokenizer, ids, skip_special_tokens=False)
    assert "".join(parts) == whole
    assert "\ufffd" in whole or not any("\ufffd" in part for part in parts)
