"""The Python driver: executes commands of the conformance suite with tidegate_client, and decides nothing.

Requests and answers are the protocol's messages, so that nothing is lost on the way; what sends, cancels,
orders and decodes errors is the client.
"""

from __future__ import annotations

import base64
import json
import platform
import sys
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict

from tidegate.inference.v1 import inference_pb2
from tidegate_client import Client, RetryPolicy, Stream, TidegateError
from tidegate_client.requests import UnaryCall

Command = dict[str, Any]
Answer = dict[str, Any]


class _Recorder(Stream):
    """A stream that shows each message to the driver before the client takes it in."""

    on_message: Callable[[Any], None]

    def take(self, message: Any) -> Any:
        event = message.event if isinstance(message, inference_pb2.AttachResponse) else message
        if self.admitted is None or event.WhichOneof("event") != "admitted":
            self.on_message(event)
        return super().take(message)


class _Client(Client):
    _stream_class = _Recorder


class Driver:
    """One client, and the commands that run on it."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._client = _Client(target, retry=None)

    def execute(self, command: Command) -> Answer:
        """Run one command; the answer has what came back, whatever the status."""
        answer: Answer = {"messages": [], "code": "OK", "message": "", "error": None, "during": []}
        request = getattr(inference_pb2, command["method"] + "Request")()
        if "request_base64" in command:
            request.ParseFromString(base64.b64decode(command["request_base64"]))
        else:
            ParseDict(command["request"], request)
        try:
            if command["method"] in ("Generate", "Attach"):
                self._stream(request, command, answer)
            else:
                metadata = tuple(command.get("metadata", {}).items())
                call: UnaryCall[Any, Any] = UnaryCall(command["method"], request, MessageToDict)
                answer["messages"].append(self._client._unary(call, metadata))
        except TidegateError as error:
            answer |= {"code": error.code, "message": error.message, "error": _details(error)}
        return answer

    def _start(self, request: Any, command: Command, metadata: Any) -> Any:
        timeout_s = command["deadline_ms"] / 1000
        if command["method"] == "Attach":
            return self._client.attach(
                request.request_id, received=request.received, timeout_s=timeout_s, metadata=metadata
            )
        client = self._client
        if "reattach_ms" in command:
            client = _Client(self._target, retry=RetryPolicy(reattach_s=command["reattach_ms"] / 1000))
        return client._stream(request, timeout_s, metadata)

    def _stream(self, request: Any, command: Command, answer: Answer) -> None:
        metadata = tuple(command.get("metadata", {}).items())
        stream = self._start(request, command, metadata)

        def reached() -> None:
            count = len(answer["messages"])
            if count == command.get("cancel_after_messages"):
                stream.cancel()
            if count == command.get("during", {}).get("after_messages"):
                answer["during"] = [self.execute(inner) for inner in command["during"]["commands"]]

        def on_message(message: Any) -> None:
            answer["messages"].append(MessageToDict(message))
            reached()

        stream.on_message = on_message
        reached()
        for _ in stream:
            pass
        if stream.cancelled:  # the client ends without an error when it was asked to
            answer["code"] = "CANCELLED"


def _details(error: TidegateError) -> Answer:
    return {
        "reason": error.reason,
        "domain": error.domain,
        "metadata": dict(error.metadata),
        "retry_after_ms": None if error.retry_after_s is None else error.retry_after_s * 1000,
        "violations": [[violation.field, violation.description] for violation in error.violations],
        "quota": [[violation.subject, violation.description] for violation in error.quota],
    }


def main() -> None:
    """Answer commands from stdin until it ends."""
    driver = Driver(sys.argv[1])
    version = grpc.__version__
    about = {"language": "Python", "runtime": f"Python {platform.python_version()}, grpcio {version}"}
    print(json.dumps(about), flush=True)  # noqa: T201
    for line in sys.stdin:
        print(json.dumps(driver.execute(json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
