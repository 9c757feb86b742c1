"""The Python driver: executes commands of the conformance suite with plain grpc, and decides nothing."""

from __future__ import annotations

import base64
import json
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tidegate.inference.v1 import inference_pb2, inference_pb2_grpc

Command = dict[str, Any]
Answer = dict[str, Any]


class Driver:
    """One channel, and the commands that run on it."""

    def __init__(self, target: str) -> None:
        options = [("grpc.keepalive_time_ms", 30_000), ("grpc.enable_retries", 0)]
        self._stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(target, options=options))

    def execute(self, command: Command) -> Answer:
        """Run one command; the answer has what came back, whatever the status."""
        answer: Answer = {"messages": [], "code": "OK", "message": "", "error": None, "during": []}
        call = getattr(self._stub, command["method"])
        arguments: dict[str, Any] = {
            "timeout": command["deadline_ms"] / 1000,
            "metadata": list(command.get("metadata", {}).items()),
        }
        try:
            if command["method"] == "Generate":
                self._stream(call, command, arguments, answer)
            else:
                answer["messages"].append(MessageToDict(call(_request(command), **arguments)))
        except grpc.RpcError as error:
            answer["code"] = error.code().name
            answer["message"] = error.details()
            answer["error"] = _details(error)
        return answer

    def _stream(self, call: Callable[..., Any], command: Command, arguments: Command, answer: Answer) -> None:
        stream: Any = call(_request(command), **arguments)
        during = command.get("during", {"after_messages": -1, "commands": []})
        cancel_after = command.get("cancel_after_messages", -1)
        messages: Iterator[Any] = iter(stream)
        while True:
            if len(answer["messages"]) == cancel_after:
                stream.cancel()
            if len(answer["messages"]) == during["after_messages"]:
                answer["during"] = [self.execute(inner) for inner in during["commands"]]
            message = next(messages, None)
            if message is None:
                return
            answer["messages"].append(MessageToDict(message))


def _request(command: Command) -> Any:
    request = getattr(inference_pb2, command["method"] + "Request")()
    if "request_base64" in command:
        request.ParseFromString(base64.b64decode(command["request_base64"]))
        return request
    return ParseDict(command["request"], request)


def _details(error: grpc.RpcError) -> Answer | None:
    try:
        status = rpc_status.from_call(error)
    except Exception:  # malformed details: the code and the message still hold
        return None
    if status is None:
        return None
    found: Answer = {
        "reason": "",
        "domain": "",
        "metadata": {},
        "retry_after_ms": None,
        "violations": [],
        "quota": [],
    }
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        fields = error_details_pb2.BadRequest()
        quota = error_details_pb2.QuotaFailure()
        if detail.Unpack(info):
            found |= {"reason": info.reason, "domain": info.domain, "metadata": dict(info.metadata)}
        elif detail.Unpack(retry):
            found["retry_after_ms"] = retry.retry_delay.ToTimedelta().total_seconds() * 1000
        elif detail.Unpack(fields):
            found["violations"] += [[v.field, v.description] for v in fields.field_violations]
        elif detail.Unpack(quota):
            found["quota"] += [[v.subject, v.description] for v in quota.violations]
    return found


def main() -> None:
    """Answer commands from stdin until it ends."""
    driver = Driver(sys.argv[1])
    about = {
        "language": "Python",
        "runtime": f"Python {platform.python_version()}, grpcio {grpc.__version__}",  # type: ignore[attr-defined]
    }
    print(json.dumps(about), flush=True)  # noqa: T201
    for line in sys.stdin:
        print(json.dumps(driver.execute(json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
