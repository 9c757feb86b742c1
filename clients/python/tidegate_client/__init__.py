"""The Python client of Tidegate.

    from tidegate_client import Client

    with Client("localhost:50051") as client:
        for delta in client.generate("Once upon a time", max_tokens=32):
            print(delta.text, end="", flush=True)

Imports the generated protocol code and gRPC, and none of the services.
"""

from tidegate_client.access import Tls
from tidegate_client.admin import AdminClient
from tidegate_client.aio import AsyncClient
from tidegate_client.client import Client
from tidegate_client.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    DeadlineExceededError,
    FieldViolation,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    QuotaViolation,
    RequestCancelledError,
    ServerError,
    TidegateError,
    UnavailableError,
)
from tidegate_client.requests import GenerateOptions
from tidegate_client.retry import RetryPolicy
from tidegate_client.stream import AsyncStream, Stream
from tidegate_client.types import (
    Admitted,
    ChatMessage,
    Delta,
    Finished,
    FinishReason,
    Generation,
    Grammar,
    Model,
    Timings,
    TokenizedPrompt,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)

__all__ = [
    "AccessDeniedError",
    "AdminClient",
    "Admitted",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncStream",
    "ChatMessage",
    "Client",
    "DeadlineExceededError",
    "Delta",
    "FieldViolation",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "Generation",
    "Grammar",
    "InvalidRequestError",
    "Model",
    "NotFoundError",
    "OverloadedError",
    "QuotaViolation",
    "RequestCancelledError",
    "RetryPolicy",
    "ServerError",
    "Stream",
    "TidegateError",
    "Timings",
    "Tls",
    "TokenLogprob",
    "TokenLogprobs",
    "TokenizedPrompt",
    "UnavailableError",
    "Usage",
]
