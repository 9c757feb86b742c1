"""Fixtures for tests of the clients."""

import io
from collections.abc import Callable, Iterator

import openai
import pytest
from fake_server import FakeInference
from running_gateway import RunningGateway

from tidegate_client import Client
from tidegate_client.cli import main, screen


@pytest.fixture
def server() -> Iterator[FakeInference]:
    fake = FakeInference()
    yield fake
    fake.call_ended.set()
    fake.stop()


@pytest.fixture
def client(server: FakeInference) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


@pytest.fixture
def gateway(server: FakeInference) -> Iterator[RunningGateway]:
    running = RunningGateway(server.address)
    yield running
    server.call_ended.set()
    running.stop()


@pytest.fixture(scope="module")
def shared_gateway() -> Iterator[tuple[FakeInference, RunningGateway]]:
    """For modules that look at answers alone, and have fixtures `server` and `gateway` made of it."""
    fake = FakeInference()
    running = RunningGateway(fake.address)
    yield fake, running
    fake.call_ended.set()
    running.stop()
    fake.stop()


@pytest.fixture
def openai_client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def run(
    server: FakeInference, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process against the fake server: exit code, stdout, stderr."""
    monkeypatch.setenv("TIDEGATE_ADDRESS", server.address)
    for console in (screen.out, screen.err):
        monkeypatch.setattr(console, "width", 250)

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["tidegate", *arguments])
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run
