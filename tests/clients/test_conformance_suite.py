"""The conformance suite itself: its cases, its judgement, and the Python client against the fake peer."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from clients.conformance.driver import LANGUAGES
from clients.conformance.fake_server import FakeInferenceServer
from clients.conformance.reply import Reply, broken_stream_rules
from clients.conformance.runner import Report, Runner
from clients.conformance.suite import Call, Case, SuiteError, _case, load_cases
from clients.conformance.table import page
from tidegate.inference.v1 import inference_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
ADMITTED = {"admitted": {"requestId": "r", "promptTokens": 3}}
DELTA = {"delta": {"text": "a", "tokenIds": [7]}}
FINISHED = {
    "finished": {"reason": "FINISH_REASON_STOP", "usage": {"promptTokens": 3, "outputTokens": 1}},
}


def reply(*messages: dict) -> Reply:
    answer = {"messages": list(messages), "code": "OK", "message": "", "error": None}
    return Reply("Generate", answer, 0.0)


def test_there_are_enough_cases_and_each_expects_something():
    cases = load_cases()
    assert len(cases) >= 60
    for case in cases:
        calls = [step for step in case.steps if isinstance(step, Call)]
        assert any(call.expect or call.same_as_reference for call in calls), case.name


def test_a_good_stream_breaks_no_rule():
    assert broken_stream_rules(reply(ADMITTED, DELTA, FINISHED), pb.GenerateRequest()) == []


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([DELTA, FINISHED], "Admitted must come once and first"),
        ([ADMITTED, ADMITTED, DELTA, FINISHED], "Admitted must come once and first"),
        ([ADMITTED, DELTA], "must finish"),
        ([ADMITTED, DELTA, FINISHED, DELTA], "after the end of candidate 0"),
        ([ADMITTED, DELTA, FINISHED, FINISHED], "finished twice"),
        ([ADMITTED, DELTA, DELTA, FINISHED], "usage says 1 tokens, 2 came"),
        ([{"admitted": {"promptTokens": 4}}, DELTA, FINISHED], "differ on the prompt's tokens"),
    ],
)
def test_a_stream_against_the_rules_is_found_out(messages, words):
    assert words in broken_stream_rules(reply(*messages), pb.GenerateRequest())[0]


def test_missing_candidates_and_logprobs_are_found_out():
    request = pb.GenerateRequest(n=2)
    assert "2 candidates must finish" in broken_stream_rules(reply(ADMITTED, DELTA, FINISHED), request)[0]
    request = pb.GenerateRequest(output=pb.OutputParams(logprobs=0))
    assert "0 logprobs for 1 tokens" in broken_stream_rules(reply(ADMITTED, DELTA, FINISHED), request)[0]


def test_a_misspelt_case_is_refused():
    step = {"call": "Generate", "expects": "code == 'OK'"}
    with pytest.raises(SuiteError, match="expects"):
        _case("file", {"name": "x", "what": "y", "steps": [step]}, {})


@pytest.fixture(scope="module")
def peer() -> Runner:
    server = FakeInferenceServer()
    yield Runner({"fake": f"127.0.0.1:{server.port}"})
    server.stop()


def run(peer: Runner, cases: list[Case]) -> Report:
    return peer.run(["python"], cases)


def test_the_python_client_understands_the_fake_peer(peer: Runner):
    cases = [case for case in load_cases() if case.server == "fake" and not case.slow]
    report = run(peer, cases)
    assert len(report.outcomes) == len(cases) > 20
    assert report.failed == []


def test_an_unmet_expectation_fails_its_case_with_what_came_instead(peer: Runner):
    call = Call("Generate", {"text": "no-details"}, expect=("code == 'OK'", "nonsense > 1"))
    report = run(peer, [Case("x/y", "it fails", "fake", False, (call,))])
    [outcome] = report.failed
    assert "not so: code == 'OK'; got INTERNAL 'incident 4711'" in outcome.failures[0]
    assert "NameError" in outcome.failures[1]


def test_a_missing_toolchain_is_skipped_by_name(peer: Runner, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("clients.conformance.driver.shutil.which", lambda command: None)
    report = peer.run(["go"], load_cases("peer/details"))
    assert report.skipped["go"].startswith("no toolchain, missing: go")
    assert "skipped: no toolchain, missing: go" in page(report, load_cases("peer/details"))


def test_the_table_tells_what_failed(peer: Runner):
    call = Call("Generate", {"text": "no-details"}, expect=("code == 'OK'",))
    case = Case("x/y", "it fails", "fake", False, (call,))
    text = page(run(peer, [case]), [case])
    assert "| `x/y` | it fails | FAILS |" in text
    assert "| 0 of 1 |" in text


def test_the_api_page_is_what_the_protos_say():
    done = subprocess.run([sys.executable, ROOT / "docs" / "generate_api.py", "--check"], check=False)
    assert done.returncode == 0, "run: python docs/generate_api.py"


@pytest.mark.parametrize(
    ("language", "tool", "committed"),
    [
        ("go", "protoc-gen-go-grpc", "go"),
        ("node", "protoc", "node/src/gen"),
    ],
)
def test_committed_code_is_what_the_generator_writes(language, tool, committed, tmp_path: Path):
    lacking = LANGUAGES[language].missing()
    if lacking or which(tool) is None:
        pytest.skip(f"no toolchain for {language}, missing: {', '.join([*lacking, tool])}")
    script = ROOT / "clients" / language / "generate.sh"
    subprocess.run([script, tmp_path], check=True, env={**os.environ, "PYTHON": sys.executable})
    written = {
        path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()
    }
    assert written
    for path, content in written.items():
        assert (ROOT / "clients" / committed / path).read_bytes() == content, f"run: {script}"
