"""All languages: every case against real services, the examples, and the programs of the documentation."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.conformance.driver import CLIENTS_DIR, LANGUAGES
from clients.conformance.runner import Report, Runner
from clients.conformance.services import Services
from clients.conformance.suite import SERVERS, load_cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
DOCS = CLIENTS_DIR.parent / "docs" / "clients"
OTHERS = [name for name in LANGUAGES if name != "python"]


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services(SERVERS) as running:
        yield running


@pytest.fixture(scope="module")
def report(services: Services) -> Report:
    cases = load_cases()
    runner = Runner(services.addresses)
    runner.take_references(cases)
    return runner.run(LANGUAGES, cases)


def _skip_without_toolchain(language: str) -> None:
    lacking = LANGUAGES[language].missing()
    if lacking:
        pytest.skip(f"no toolchain for {language}, missing: {', '.join(lacking)}")


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_case_passes(language: str, report: Report):
    _skip_without_toolchain(language)
    outcomes = [outcome for outcome in report.outcomes if outcome.language == language]
    assert len(outcomes) == len(load_cases())
    assert [outcome for outcome in outcomes if outcome.failures] == []


@pytest.mark.parametrize("language", OTHERS)
def test_the_example_streams_cancels_and_shows_errors(language: str, services: Services):
    _skip_without_toolchain(language)
    LANGUAGES[language].build()
    shown = _run([str(CLIENTS_DIR / language / "build" / "example"), services.addresses["default"]])
    assert "40 tokens]" in shown
    assert "[cancelled" in shown
    assert re.search("DEADLINE_EXCEEDED|DeadlineExceeded", shown)
    assert re.search("INVALID_ARGUMENT|InvalidArgument", shown)
    assert "sampling.top_p" in shown


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_shortest_program_of_the_documentation_streams(language: str, services: Services, tmp_path: Path):
    _skip_without_toolchain(language)
    LANGUAGES[language].build()
    program = re.search(r"```\w+\n(.*?)```", (DOCS / f"{language}.md").read_text(), re.DOTALL)
    assert program is not None
    source = program[1].replace("localhost:50051", services.addresses["default"])
    assert len(_run(_command(language, source, tmp_path)).split()) > 5


def _command(language: str, source: str, folder: Path) -> list[str]:
    """How a person would run the program, with the package where it was built."""
    here = CLIENTS_DIR / language

    def written(name: str) -> str:
        (folder / name).write_text(source)
        return str(folder / name)

    if language == "python":
        return [sys.executable, written("shortest.py")]
    if language == "node":
        source = source.replace('"tidegate-client"', f'"{here}/dist/src/index.js"')
        checks = ["--strict", "--skipLibCheck", "--target", "ES2022", "--module", "NodeNext"]
        types = ["--typeRoots", f"{here}/node_modules/@types", "--types", "node"]
        _run([f"{here}/node_modules/.bin/tsc", *checks, *types, written("shortest.mts")])
        return ["node", str(folder / "shortest.mjs")]
    if language == "ruby":
        return ["ruby", f"-I{here}/lib", f"-I{here}/build/gen", written("shortest.rb")]
    if language == "go":
        path = f"{here}/build/gopath:/usr/share/gocode"
        return ["env", "GO111MODULE=off", f"GOPATH={path}", "go", "run", written("shortest.go")]
    if language == "java":
        started = shlex.split((here / "build" / "driver").read_text().splitlines()[1])
        return ["java", "-cp", started[started.index("-cp") + 1], written("Shortest.java")]
    binary = str(folder / "shortest")
    flags = shlex.split(_run(["pkg-config", "--cflags", "--libs", "grpc++", "protobuf"]))
    include = [f"-I{here}/include", f"-I{here}/build/gen"]
    _run(
        [
            "g++",
            "-std=c++17",
            *include,
            written("shortest.cc"),
            f"{here}/build/libtidegate.a",
            *flags,
            "-o",
            binary,
        ]
    )
    return [binary]


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout
