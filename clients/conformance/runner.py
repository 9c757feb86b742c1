"""Owns a run of the suite: executes cases with the drivers, which decide nothing, and checks the answers."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict

from clients.conformance.driver import LANGUAGES, DriverError, DriverProcess, Language
from clients.conformance.fake_server import UNKNOWN_FIELD
from clients.conformance.reply import Reply, broken_stream_rules, evaluate
from clients.conformance.suite import Call, Case, Idle, Sleep
from tidegate.admin.v1 import admin_pb2, admin_pb2_grpc
from tidegate.inference.v1 import inference_pb2

IDLE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one case went in one language."""

    case: str
    language: str
    failures: tuple[str, ...]  # empty: it passed
    seconds: float


@dataclass(slots=True)
class Report:
    """All outcomes, and the languages that could not be run."""

    outcomes: list[Outcome] = field(default_factory=list)
    runtimes: dict[str, str] = field(default_factory=dict)  # by language
    skipped: dict[str, str] = field(default_factory=dict)  # language -> why

    @property
    def failed(self) -> list[Outcome]:
        """The outcomes that are not as they must be."""
        return [outcome for outcome in self.outcomes if outcome.failures]


class Runner:
    """Runs cases against running servers, given by name.

    Languages run side by side, as the server batches their requests; one after the other where a case asks
    whether the server is idle, or fills a small one.
    """

    def __init__(self, servers: Mapping[str, str]) -> None:
        self._servers = servers
        self._reference: dict[tuple[str, int], Reply] = {}  # (case, step) -> what the Python driver got

    def take_references(self, cases: list[Case]) -> None:
        """Have the Python driver execute the cases that others are compared with."""
        chosen = [c for c in cases if any(isinstance(s, Call) and s.same_as_reference for s in c.steps)]
        with _Drivers(LANGUAGES["python"], self._servers) as drivers:
            for case in chosen:
                run = _CaseRun(case, drivers, "reference", {})
                run.execute()
                self._reference.update({(case.name, step): reply for step, reply in run.replies.items()})

    def run(
        self,
        languages: Iterable[str],
        cases: list[Case],
        progress: Callable[[Outcome], None] = lambda _: None,
    ) -> Report:
        """Run all cases in all languages that can be built."""
        report = Report()
        together = [case for case in cases if not _is_alone(case)]
        alone = [case for case in cases if _is_alone(case)]
        with ExitStack() as stack:
            ready = []
            for language in map(LANGUAGES.__getitem__, languages):
                lacking = language.missing()
                if lacking:
                    report.skipped[language.name] = f"no toolchain, missing: {', '.join(lacking)}"
                    continue
                language.build()
                ready.append(stack.enter_context(_Drivers(language, self._servers)))
            with ThreadPoolExecutor(max(1, len(ready))) as pool:
                for outcomes in pool.map(lambda drivers: self._run_cases(drivers, together, progress), ready):
                    report.outcomes += outcomes
            for drivers in ready:
                report.outcomes += self._run_cases(drivers, alone, progress)
                report.runtimes[drivers.language.name] = drivers.runtime
        return report

    def _run_cases(
        self, drivers: _Drivers, cases: list[Case], progress: Callable[[Outcome], None]
    ) -> list[Outcome]:
        outcomes = []
        for case in cases:
            started = time.monotonic()
            run = _CaseRun(case, drivers, drivers.language.name, self._reference)
            failures = tuple(run.execute())
            outcomes.append(Outcome(case.name, drivers.language.name, failures, time.monotonic() - started))
            progress(outcomes[-1])
        return outcomes


def _is_alone(case: Case) -> bool:
    return case.server == "small" or any(isinstance(step, Idle) for step in case.steps)


class _Drivers:
    """One driver process for each server, started when a case first needs it, and again if it died."""

    def __init__(self, language: Language, servers: Mapping[str, str]) -> None:
        self.language = language
        self.servers = servers
        self.runtime = ""
        self._running: dict[str, DriverProcess] = {}

    def execute(self, server: str, command: dict[str, Any]) -> dict[str, Any]:
        """Run one command at that server. Raises DriverError."""
        if server not in self._running:
            self._running[server] = DriverProcess(self.language, self.servers[server])
            self.runtime = self._running[server].about["runtime"]
        try:
            return self._running[server].execute(command)
        except DriverError:
            self._running.pop(server).close()
            raise

    def __enter__(self) -> _Drivers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.close()


class _CaseRun:
    """One case in one language."""

    def __init__(
        self, case: Case, drivers: _Drivers, me: str, reference: Mapping[tuple[str, int], Reply]
    ) -> None:
        self._case = case
        self._drivers = drivers
        self._reference = reference
        self._named: dict[str, Any] = {"me": me}  # names for expressions
        self.replies: dict[int, Reply] = {}  # by step

    def execute(self) -> list[str]:
        """Run the steps until one fails; what failed, in words."""
        for number, step in enumerate(self._case.steps):
            try:
                failures = self._step(number, step)
            except (DriverError, grpc.RpcError) as error:
                failures = [str(error)]
            if failures:
                return [f"step {number + 1}: {failure}" for failure in failures]
        return []

    def _step(self, number: int, step: Call | Idle | Sleep) -> list[str]:
        if isinstance(step, Sleep):
            time.sleep(step.seconds)
            return []
        if isinstance(step, Idle):
            return _wait_until_idle(self._drivers.servers[self._case.server])
        command = self._command(step)
        started = time.monotonic()
        answer = self._drivers.execute(self._case.server, command)
        reply = self._reply(step, answer, time.monotonic() - started)
        self.replies[number] = reply
        failures = self._check(step, command, reply)
        if not failures and step.same_as_reference and (self._case.name, number) in self._reference:
            failures = _differences(reply, self._reference[self._case.name, number])
        return failures

    def _command(self, call: Call) -> dict[str, Any]:
        request = _resolved(call.request, self._named)
        command: dict[str, Any] = {"method": call.method, "deadline_ms": call.deadline_ms}
        if call.unknown_field:
            message = ParseDict(request, getattr(inference_pb2, call.method + "Request")())
            command["request_base64"] = base64.b64encode(message.SerializeToString() + UNKNOWN_FIELD).decode()
        else:
            command["request"] = request
        if call.metadata:
            command["metadata"] = call.metadata
        if call.cancel_after_messages is not None:
            command["cancel_after_messages"] = call.cancel_after_messages
        if call.reattach_ms is not None:
            command["reattach_ms"] = call.reattach_ms
        if call.during:
            inner = [self._command(each) for each in call.during]
            command["during"] = {"after_messages": call.during_after, "commands": inner}
        return command

    def _reply(self, call: Call, answer: dict[str, Any], elapsed_s: float) -> Reply:
        reply = Reply(call.method, answer, elapsed_s)
        answers = answer.get("during") or []
        reply.during = [
            self._reply(inner, each, 0.0) for inner, each in zip(call.during, answers, strict=False)
        ]
        if call.name:
            self._named[call.name] = reply
        return reply

    def _check(self, call: Call, command: dict[str, Any], reply: Reply) -> list[str]:
        failures = []
        if call.method == "Generate" and reply.code == "OK" and "request" in command:
            request = ParseDict(command["request"], inference_pb2.GenerateRequest())
            failures += broken_stream_rules(reply, request)
        if len(reply.during) != len(call.during):
            failures.append(f"the stream ended before its inner commands: {reply.code} {reply.message}")
        for expression in call.expect:
            failures += _unmet(expression, reply, self._named)
        for inner, answer in zip(call.during, reply.during, strict=False):
            failures += self._check(inner, {}, answer)
        return failures


def _unmet(expression: str, reply: Reply, named: dict[str, Any]) -> list[str]:
    try:
        if evaluate(expression, reply.names(named)):
            return []
        why = ""
    except Exception as error:  # an expectation that can't be computed is not met
        why = f" ({type(error).__name__}: {error})"
    kinds = reply.kinds[:8] if reply.is_stream else ""
    return [f"not so: {expression}{why}; got {reply.code} {reply.message!r} {reply.error} {kinds}"]


def _resolved(value: Any, named: dict[str, Any]) -> Any:
    """The value with each `${expression}` computed."""
    if isinstance(value, dict):
        return {key: _resolved(inner, named) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner, named) for inner in value]
    if isinstance(value, str) and value.startswith("${") and value.endswith("}"):
        return evaluate(value[2:-1], named)
    return value


def _differences(reply: Reply, reference: Reply) -> list[str]:
    count = 1 + max((m.finished.index for m in reference.messages if m.HasField("finished")), default=0)
    for index in range(count):
        mine = (reply.text(index), reply.tokens(index), reply.finished(index).reason)
        other = (reference.text(index), reference.tokens(index), reference.finished(index).reason)
        if mine != other:
            return [f"candidate {index} differs from the reference: {mine!r} against {other!r}"]
    return []


def _wait_until_idle(target: str) -> list[str]:
    """Wait until no request is there and no block is used; what is left, in words."""
    with grpc.insecure_channel(target) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            state = stub.GetState(admin_pb2.GetStateRequest(verify=True), timeout=10)
            if state.violations:
                return [f"invariants are broken: {list(state.violations)}"]
            used = sum(worker.blocks_used for worker in state.workers)
            if not (state.running_requests or state.waiting_requests or used):
                return []
            if time.monotonic() > deadline:
                left = (
                    f"{state.running_requests} running, {state.waiting_requests} waiting, {used} blocks used"
                )
                return [f"not idle: {left}"]
            time.sleep(0.02)
