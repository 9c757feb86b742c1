"""`tidegate demo` with the real services: text, usage and timings, exit code 0, and no process left."""

import os
import re
import subprocess
import sys

import psutil
import pytest


@pytest.mark.slow
def test_the_demo_streams_an_answer_and_leaves_no_process() -> None:
    marker = f"demo-test-{os.getpid()}"
    done = subprocess.run(
        [sys.executable, "-m", "tidegate_client.cli", "demo", "What is the capital of France?"],
        capture_output=True,
        text=True,
        env=os.environ | {"TIDEGATE_TEST_MARKER": marker},
    )
    assert done.returncode == 0, done.stderr
    question, answer, usage, timings = done.stdout.splitlines()
    assert question == "> What is the capital of France?"
    assert answer.startswith("The capital of France is Paris.")
    assert re.fullmatch(r"usage: 37 prompt tokens \(0 cached\), \d+ output tokens, ended by stop", usage)
    assert re.fullmatch(
        r"timings: queue [\d.]+ ms, prefill [\d.]+ ms, decode [\d.]+ ms, time to first token [\d.]+ ms, "
        r"[\d.]+ tokens/s",
        timings,
    )
    assert [process for process in psutil.process_iter() if has_variable(process, marker)] == []


def has_variable(process: psutil.Process, value: str) -> bool:
    try:
        return value in process.environ().values()
    except psutil.Error:
        return False
