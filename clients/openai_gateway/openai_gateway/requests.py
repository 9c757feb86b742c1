"""The bodies of requests: OpenAI's fields and Tidegate's own, typed.

Owns which fields there are and which are refused. Ranges are the scheduler's to check, which knows the model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openai_gateway.errors import HttpError, refused

MAX_PROMPTS = 128


class Body(BaseModel):
    """Every object in a request: unknown fields are refused, and types are not guessed."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers, which no stream here has
    continuous_usage_stats: bool | None = None  # asked for by load tools; usage comes once, at the end


class StructuredOutputs(Body):
    """An extension: a form that the output must have. Exactly one of the first four."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    grammar_syntax: Literal["ebnf", "lark"] | None = None


class CommonFields(Body):
    """What chats and completions have in common."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    user: str | None = None

    # Tidegate's own, by the names that its API and other servers have for them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    queue_timeout_s: float | None = None
    timeout_s: float | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionRequest(CommonFields):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    # Accepted where it asks for nothing.
    suffix: None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one. Raises HttpError for none or too many."""
        prompt: Any = self.prompt
        prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise refused(f"prompt: {len(prompts)} prompts; allowed: 1 to {MAX_PROMPTS} of them", "prompt")
        return list(prompts)


class FunctionCall(Body):
    """What an assistant called in an earlier turn."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # in calls that were put together from a stream


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None  # parts, of which only texts can be served
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None  # of a tool, where some clients repeat it
    # What answers carry, for clients that send them back as they came.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class JsonSchema(Body):
    """The schema of a response_format."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # output always matches


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments always match


class Tool(Body):
    """A tool."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    """The function that must be called."""

    name: str


class ToolChoice(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(CommonFields):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: one call at most
    modalities: list[Literal["text"]] | None = None
    # Accepted where they ask for nothing that could be noticed.
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


RequestT = TypeVar("RequestT", bound=CommonFields)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """Reads a body. Raises HttpError 400 that names the first field that is wrong, never its value."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> HttpError:
    details = error.errors(include_url=False, include_input=False)
    # A field of several types reports each; the one that got furthest is what was meant.
    detail = max(details, key=lambda each: (each["type"] == "extra_forbidden", len(each["loc"])))
    if detail["type"] == "json_invalid":
        return refused(f"the body is not valid JSON: {detail['msg'].removeprefix('Invalid JSON: ')}")
    path = ".".join(str(step) for step in detail["loc"] if not _is_type(step))
    if detail["type"] == "extra_forbidden":
        return refused(f"{path}: this service has no such parameter", path, "unknown_parameter")
    return refused(f"{path or 'the body'}: {_decapitalized(detail['msg'])}", path or None)


def _is_type(step: int | str) -> bool:
    """Whether a step of a path is not of the body, but names the type that was tried."""
    return isinstance(step, str) and (step in ("str", "ToolChoice", "[key]") or "[" in step)


def _decapitalized(text: str) -> str:
    return text[:1].lower() + text[1:]
