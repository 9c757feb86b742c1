"""The dashboards: every query parses, is about metrics that there are, and finds data in Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import urllib.parse
from pathlib import Path

import grpc
import pytest
import yaml
from service_process import SERVING, generate, read, until_health
from telemetry.receivers import save_tiny_model, scheduler_process, worker_process
from test_prometheus import INFERENCE, fetch, needs, prometheus, promtool

from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc
from tidegate_telemetry import names

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
BOARDS = sorted(FOLDER.glob("*.json"))


def queries(board: Path) -> dict[str, str]:
    """Expressions by panel and letter, with what Grafana would put for its variables."""
    found = {}
    for panel in json.loads(board.read_text())["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$__rate_interval", "10s")
            found[f"{panel['title']} {target['refId']}"] = re.sub(r"\$(job|worker)\b", ".*", expr)
    return found


def test_there_are_boards():
    assert [board.name for board in BOARDS] == ["service.json", "workers.json"]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_queries_parse(board, tmp_path):
    rules = [{"record": f"q{i}", "expr": expr} for i, expr in enumerate(queries(board).values())]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "q", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", "queries.yaml", folder=tmp_path)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_queries_are_about_metrics_that_there_are(board):
    known = {metric.prometheus_name for metric in names.METRICS}
    known |= {f"{name}_{suffix}" for name in known for suffix in ("bucket", "count", "sum")}
    for title, expr in queries(board).items():
        used = set(re.findall(r"\b(?:tidegate|gen_ai)_\w+(?=[{)\[])", re.sub(r"by \([^)]*\)", "", expr)))
        assert used, title
        assert used <= known, title


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_panels_have_places_of_their_own(board):
    content = json.loads(board.read_text())
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in content["panels"]]
    assert len(ids) == len(set(ids))
    for panel in content["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_every_query_finds_data(tmp_path):
    program = needs("prometheus")
    model = save_tiny_model(tmp_path / "model")
    flags = ("--metrics-port", "0", "--served-model-name", "fake")
    options = ("--metrics-port", "0", "--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    async with (
        worker_process(model, *flags) as worker,
        scheduler_process(tmp_path, *options, "--worker", worker["address"]) as scheduler,
        grpc.aio.insecure_channel(f"127.0.0.1:{scheduler['port']}") as channel,
    ):
        await until_health(channel, INFERENCE, SERVING)
        stub = pb_grpc.InferenceServiceStub(channel)
        await ask(stub, 1)
        ports = [each["metrics_port"] for each in (scheduler, worker)]
        async with prometheus(program, tmp_path, ports) as query:
            load = asyncio.create_task(keep_asking(stub))
            missing = [expr for board in BOARDS for expr in queries(board).values()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(60):
                    while missing := [e for e in missing if not await has_data(query, e)]:  # noqa: ASYNC110
                        await asyncio.sleep(1)
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    assert missing == []


async def has_data(query: str, expression: str) -> bool:
    """Whether it gives a number now."""
    url = f"{query}?{urllib.parse.urlencode({'query': expression})}"
    with contextlib.suppress(OSError):  # it has not started yet
        result = json.loads(await asyncio.to_thread(fetch, url))["data"]["result"]
        return any(series["value"][1] != "NaN" for series in result)
    return False


async def keep_asking(stub: pb_grpc.InferenceServiceStub) -> None:
    for seed in range(10_000):
        await ask(stub, seed)


async def ask(stub: pb_grpc.InferenceServiceStub, seed: int) -> None:
    """Some requests, of which all but two come to a full queue."""
    calls = (read(stub.Generate(generate(max_tokens=20, seed=seed + i))) for i in range(6))
    await asyncio.gather(*calls, return_exceptions=True)
