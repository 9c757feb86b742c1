"""Our encoding of spans is the SDK's."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as encode_by_sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from tidegate_telemetry.otlp import encode_spans

_TEXT = st.text(max_size=8)
_VALUE = st.one_of(
    _TEXT,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(_TEXT, max_size=3).map(tuple),
)
_ATTRIBUTES = st.dictionaries(st.text(min_size=1, max_size=8), _VALUE, max_size=4)
_TIME = st.integers(1, 2**63 - 1)
_STATES = st.sampled_from([None, TraceState(), TraceState([("a", "1"), ("b", "2")])])
_CONTEXT = st.builds(
    SpanContext,
    trace_id=st.integers(1, 2**128 - 1),
    span_id=st.integers(1, 2**64 - 1),
    is_remote=st.booleans(),
    trace_flags=st.just(TraceFlags(TraceFlags.SAMPLED)),
    trace_state=_STATES,
)
_STATUS = st.one_of(
    st.just(Status()), st.just(Status(StatusCode.OK)), _TEXT.map(lambda text: Status(StatusCode.ERROR, text))
)
_RESOURCES = [Resource({"service.name": "one"}), Resource({"service.name": "two", "n": 1}, "https://schema")]
_SCOPES = [None, InstrumentationScope("a"), InstrumentationScope("b", "1", "https://schema", {"k": True})]
_SPAN = st.builds(
    ReadableSpan,
    name=_TEXT,
    context=_CONTEXT,
    parent=st.none() | _CONTEXT,
    resource=st.sampled_from(_RESOURCES),
    attributes=_ATTRIBUTES,
    events=st.lists(st.builds(Event, _TEXT, _ATTRIBUTES, _TIME), max_size=3),
    links=st.lists(st.builds(Link, _CONTEXT, _ATTRIBUTES), max_size=3),
    kind=st.sampled_from(SpanKind),
    instrumentation_scope=st.sampled_from(_SCOPES),
    status=_STATUS,
    start_time=_TIME,
    end_time=_TIME,
)


def _by_resource(request: Any) -> list[tuple[Any, Any, list[Any]]]:
    """(resource, scope, spans), as the order of groups does not matter."""
    groups = [
        (of_resource, of_scope, list(of_scope.spans))
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
    ]
    return sorted(
        (
            (str(of_resource.resource), of_resource.schema_url),
            (str(of_scope.scope), of_scope.schema_url),
            spans,
        )
        for of_resource, of_scope, spans in groups
    )


@given(st.lists(_SPAN, max_size=6))
def test_spans_are_encoded_as_the_sdk_encodes_them(spans: list[ReadableSpan]) -> None:
    ours, theirs = encode_spans(spans), encode_by_sdk(spans)
    assert _by_resource(ours) == _by_resource(theirs)
    assert sum(len(spans) for _, _, spans in _by_resource(ours)) == len(spans)
