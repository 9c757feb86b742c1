"""Stop strings are found as soon as they are complete, wherever the text is cut, and never leak."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_tokenizers import library_tokenizer, tokenizer_json

from scheduler_service.text.output_text import OutputText
from scheduler_service.text.stop_strings import StopMatcher, StopStrings
from scheduler_service.text.tokenizer import TextTokenizer


def expected(text, stops):
    """The text before the stop string that ends first (the longest of those that do), and that string."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


def run(text, stops, cuts):
    """What goes out, piece by piece, and what was found."""
    matcher = StopMatcher(StopStrings(stops))
    parts = []
    position = 0
    for cut in cuts:
        part, stop = matcher.feed(text[position : position + cut])
        parts.append(part)
        if stop is not None:
            return parts, stop
        position += cut
    part, stop = matcher.feed(text[position:])
    return ([*parts, part], stop) if stop is not None else ([*parts, part + matcher.flush()], None)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=40),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 6), max_size=20),
)
def test_any_cut_gives_what_a_search_of_the_whole_text_gives(text, stops, cuts):
    parts, stop = run(text, stops, cuts)
    assert ("".join(parts), stop) == expected(text, stops)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_only_a_possible_start_is_held_back(text, stops):
    matcher = StopMatcher(StopStrings(stops))
    sent = ""
    for end, character in enumerate(text, start=1):
        part, stop = matcher.feed(character)
        sent += part
        if stop is not None:
            return
        held = text[len(sent) : end]
        longest = max(
            (n for stop in stops for n in range(1, len(stop)) if text[:end].endswith(stop[:n])), default=0
        )
        assert held == text[end - longest : end]


@pytest.mark.parametrize(
    ("pieces", "stops", "sent", "found"),
    [
        (["Hello wor", "ld!"], ["world"], "Hello ", "world"),
        (["aaab"], ["aab"], "a", "aab"),
        (["abcd"], ["abcd", "bc"], "a", "bc"),
        (["x\n", "\ny"], ["\n\n"], "x", "\n\n"),
        (["ab", "cd"], ["b", "abc"], "a", "b"),
        (["你好", "世界"], ["好世"], "你", "好世"),
    ],
)
def test_examples(pieces, stops, sent, found):
    matcher = StopMatcher(StopStrings(stops))
    parts = []
    for piece in pieces:
        part, stop = matcher.feed(piece)
        parts.append(part)
        if stop is not None:
            break
    assert ("".join(parts), stop) == (sent, found)


def test_a_held_start_is_released_when_it_turns_out_to_be_none():
    matcher = StopMatcher(StopStrings(["END."]))
    assert matcher.feed("the EN") == ("the ", None)
    assert matcher.feed("D of it EN") == ("END of it ", None)
    assert matcher.flush() == "EN"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_number_of_tokens_is_that_of_the_token_that_completed_it(kind):
    library, tokenizer = library_tokenizer(kind), TextTokenizer(tokenizer_json(kind))
    ids = library.encode("The quick brown fox\njumps over the lazy dog.", add_special_tokens=False).ids
    for stop in ("\n", "quick", "x\nj", "dog."):
        shortest = next(n for n in range(1, len(ids) + 1) if stop in library.decode(ids[:n]))
        output = OutputText(tokenizer.detokenizer(skip_special_tokens=True), StopStrings([stop]))
        text = ""
        for token_id in ids:
            text += output.feed([token_id])
            if output.stop_string is not None:
                break
        assert output.num_tokens == shortest
        assert text + output.finish() == library.decode(ids).split(stop)[0]


def test_a_stop_string_can_end_in_a_byte_run_that_goes_on():
    library, tokenizer = library_tokenizer("byte_fallback"), TextTokenizer(tokenizer_json("byte_fallback"))
    ids = [library.token_to_id(f"<0x{byte:02X}>") for byte in "你好吗".encode()]
    output = OutputText(tokenizer.detokenizer(skip_special_tokens=True), StopStrings(["好"]))
    text = ""
    while output.stop_string is None:
        text += output.feed([ids[output.num_tokens]])
    assert (text, output.num_tokens) == ("你", 6)


def test_a_stop_string_in_the_flushed_rest_is_found():
    library, tokenizer = library_tokenizer("byte_level"), TextTokenizer(tokenizer_json("byte_level"))
    output = OutputText(tokenizer.detokenizer(skip_special_tokens=True), StopStrings(["\ufffd"]))
    assert output.feed(library.encode("ok 🦖").ids[:-1]) == "ok "
    assert output.finish() == ""
    assert output.stop_string == "\ufffd"
