"""Forms of outputs: what is refused before it is queued, and that no form can hold up or hurt the service."""

import asyncio
import json
import time

import pytest
from byte_tokenizer import END, SPECIAL_TOKENS, VOCAB_SIZE
from fake_engine import served_model
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.errors import Reason, ServiceError
from scheduler_service.grammar_compiler import MAX_WAITING, GrammarCompiler
from scheduler_service.grammar_process import FormError, compile_form, read_vocabulary
from scheduler_service.output_form import MAX_FORM_BYTES, OutputForm
from scheduler_service.validation import check_generate
from tidegate.inference.v1 import inference_pb2 as pb

MODEL = served_model(
    "tiny",
    vocab_size=VOCAB_SIZE,
    eos_token_ids=frozenset([END]),
    tokenizer_json=b"{}",
    structured_output=True,
)
LARK, EBNF = pb.GRAMMAR_SYNTAX_LARK, pb.GRAMMAR_SYNTAX_EBNF
# Takes many seconds, were it not stopped.
ENDLESS = json.dumps({"type": "integer", "multipleOf": 999_983})


def form_of(asked: pb.StructuredOutput, model=MODEL, **request) -> OutputForm | None:
    ids = pb.TokenIds(ids=[5])
    message = pb.GenerateRequest(model=model.name, token_ids=ids, structured_output=asked, **request)
    return check_generate(message, {model.name: model}).form


def violations(asked: pb.StructuredOutput, model=MODEL, **request) -> dict[str, str]:
    with pytest.raises(ServiceError) as caught:
        form_of(asked, model, **request)
    return {field.subject: field.description for field in caught.value.fields}


def test_each_form_is_taken_as_it_is():
    assert form_of(pb.StructuredOutput(json_schema="{}")) == OutputForm("json_schema", "{}")
    assert form_of(pb.StructuredOutput(regex="a+")) == OutputForm("regex", "a+")
    assert form_of(pb.StructuredOutput(choice=pb.Choice(values=["a", "é"]))).kind == "choice"
    assert form_of(pb.StructuredOutput(grammar=pb.Grammar(syntax=LARK, text="start: A"))).kind == "lark"
    assert form_of(pb.StructuredOutput(grammar=pb.Grammar(syntax=EBNF, text="root ::= A"))).kind == "ebnf"
    message = pb.GenerateRequest(model="tiny", token_ids=pb.TokenIds(ids=[5]))
    assert check_generate(message, {"tiny": MODEL}).form is None


@pytest.mark.parametrize(
    ("asked", "field", "description"),
    [
        (pb.StructuredOutput(), "structured_output", "no form is set; set exactly one of its fields"),
        (pb.StructuredOutput(regex=""), "structured_output.regex", "0 bytes; allowed: 1 to 65,536"),
        (
            pb.StructuredOutput(json_schema="é" * MAX_FORM_BYTES),
            "structured_output.json_schema",
            "131,072 bytes; allowed: 1 to 65,536",
        ),
        (
            pb.StructuredOutput(choice=pb.Choice(values=map(str, range(1025)))),
            "structured_output.choice.values",
            "1025 texts; allowed: 1 to 1024",
        ),
        (
            pb.StructuredOutput(choice=pb.Choice(values=["a", ""])),
            "structured_output.choice.values[1]",
            "the text is empty; allowed: 1 character or more",
        ),
        (
            pb.StructuredOutput(choice=pb.Choice(values=["a", "b", "a"])),
            "structured_output.choice.values",
            "1 texts are there twice",
        ),
        (
            pb.StructuredOutput(grammar=pb.Grammar(text="start: A")),
            "structured_output.grammar.syntax",
            "0; allowed: GRAMMAR_SYNTAX_LARK, GRAMMAR_SYNTAX_EBNF",
        ),
    ],
)
def test_what_is_no_form_is_named(asked, field, description):
    assert violations(asked)[field] == description


def test_what_contradicts_a_form_is_refused():
    asked = pb.StructuredOutput(regex="a")
    assert list(violations(asked, stopping=pb.StoppingParams(ignore_eos=True))) == ["stopping.ignore_eos"]
    without_text = served_model("tiny", tokenizer_json=b"", structured_output=False)
    assert "has no tokenizer" in violations(asked, without_text)["structured_output"]
    unable = served_model("tiny", tokenizer_json=b"{}", structured_output=False)
    assert "hold outputs to no form" in violations(asked, unable)["structured_output"]


VOCABULARY = read_vocabulary(json.dumps([VOCAB_SIZE, SPECIAL_TOKENS, [END]]))

_LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4) | st.floats(-2, 2)
_KEYWORDS = (
    st.sampled_from(["type", "enum", "const", "items", "prefixItems", "minItems", "maxItems", "properties"])
    | st.sampled_from(["required", "additionalProperties", "pattern", "format", "minLength", "maxLength"])
    | st.sampled_from(["minimum", "maximum", "multipleOf", "anyOf", "oneOf", "allOf", "not", "if", "then"])
    | st.sampled_from(["else", "$ref", "$defs", "uniqueItems", "patternProperties", "x-guidance", "default"])
)
_TYPES = st.sampled_from(
    ["object", "array", "string", "integer", "number", "boolean", "null", "date", "#", "^a"]
)
_SCHEMAS = st.recursive(
    _LEAVES | _TYPES,
    lambda inner: st.dictionaries(_KEYWORDS, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(_SCHEMAS | st.dictionaries(_KEYWORDS, _SCHEMAS, min_size=1, max_size=5))
def test_any_schema_is_compiled_or_refused(schema):
    check_outcome("json_schema", json.dumps(schema))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["json_schema", "regex", "lark", "ebnf"]),
    st.text(st.sampled_from("ab01:=|()[]{}*+?.^$\\/\"'<>-, \n#%~&@estar root"), max_size=40)
    | st.text(max_size=20),
)
def test_any_text_is_compiled_or_refused(kind, text):
    check_outcome(kind, text)


def check_outcome(kind: str, text: str) -> None:
    try:
        grammar = compile_form(kind, text, VOCABULARY)
    except FormError as error:
        assert str(error)
        return
    assert grammar


def test_keys_that_are_not_followed_are_named_with_what_to_do():
    with pytest.raises(FormError) as caught:
        compile_form("json_schema", '{"type": "array", "contains": {"type": "integer"}}', VOCABULARY)
    assert str(caught.value) == (
        'Unimplemented keys: ["contains"]; leave these keys of the schema out, or say the same by others'
    )


def test_choices_are_taken_literally():
    import llguidance

    values = ['say "hi"', "back\\slash", "new\nline", "tab\t/x/", "😀 é", "\x00\x1f", "a|b", "<</s>>"]
    grammar = compile_form("choice", json.dumps(values), VOCABULARY)
    for value in values:
        matcher = llguidance.LLMatcher(VOCABULARY, grammar)
        assert matcher.consume_tokens(VOCABULARY.tokenize_str(value)), value
        assert matcher.is_accepting()


async def compiled(compiler: GrammarCompiler, kind: str, text: str) -> str:
    return await compiler.compile(MODEL, SPECIAL_TOKENS, OutputForm(kind, text))


async def refusal(compiler: GrammarCompiler, kind: str, text: str) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await compiled(compiler, kind, text)
    return caught.value


async def test_a_form_that_never_ends_compiling_is_stopped_and_the_next_is_compiled():
    compiler = GrammarCompiler()
    slow = asyncio.create_task(refusal(compiler, "json_schema", ENDLESS))
    assert "[a-z]" in await compiled(compiler, "regex", "[a-z]")
    error = await slow
    assert (error.reason, error.fields[0].subject) == (
        Reason.INVALID_GRAMMAR,
        "structured_output.json_schema",
    )
    assert "takes more than 500 ms of computing" in error.message
    assert "[0-9]" in await compiled(compiler, "regex", "[0-9]")


async def test_the_event_loop_goes_on_meanwhile():
    compiler = GrammarCompiler()
    slow = asyncio.create_task(refusal(compiler, "json_schema", ENDLESS))
    turns = 0
    while not slow.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 50


async def test_a_form_is_compiled_once_whatever_came_of_it():
    compiler = GrammarCompiler()
    many = [compiled(compiler, "regex", "x{3}") for _ in range(20)]
    assert len(set(await asyncio.gather(*many))) == 1
    first = await refusal(compiler, "json_schema", ENDLESS)
    started = time.process_time()
    again = [await refusal(compiler, "json_schema", ENDLESS) for _ in range(200)]
    assert {error.message for error in again} == {first.message}
    assert time.process_time() - started < 2  # not 200 times half a second


async def test_too_many_forms_at_once_are_told_to_come_later():
    compiler = GrammarCompiler()
    waiting = [asyncio.create_task(compiled(compiler, "regex", f"a{i}")) for i in range(MAX_WAITING)]
    await asyncio.sleep(0)
    error = await refusal(compiler, "regex", "b")
    assert (error.reason, error.retry_after_s) == (Reason.QUEUE_FULL, 1.0)
    assert len(set(await asyncio.gather(*waiting))) == MAX_WAITING
    assert await compiled(compiler, "regex", "b")


async def test_who_gives_up_waiting_leaves_the_form_to_others():
    compiler = GrammarCompiler()
    impatient = asyncio.create_task(compiled(compiler, "regex", "c+"))
    patient = asyncio.create_task(compiled(compiler, "regex", "c+"))
    await asyncio.sleep(0)
    impatient.cancel()
    assert "c+" in await patient
