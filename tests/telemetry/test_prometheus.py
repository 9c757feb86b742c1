"""What Prometheus scrapes: every metric is there, in a clean form, and alerts are about what there is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import yaml
from fake_worker import FakeWorker
from service_process import SERVING, generate, read, until_health
from telemetry.receivers import save_tiny_model, scheduler_process, worker_process

from scheduler_service.config import ServiceConfig
from scheduler_service.server import Service
from scheduler_service.telemetry import Telemetry
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc
from tidegate_telemetry import names
from tidegate_telemetry.exporting import Outlets, PrometheusEndpoint

RULES = Path(__file__).parents[2] / "deploy" / "prometheus"
INFERENCE = "tidegate.inference.v1.InferenceService"


def needs(tool: str) -> str:
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not installed (Debian: apt-get install prometheus)")
    return path


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def promtool(*arguments: str, text: str | None = None, folder: Path = RULES) -> str:
    command = [needs("promtool"), *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextlib.asynccontextmanager
async def loaded_service() -> AsyncIterator[Service]:
    """A scheduler that has served some requests, and refused one."""
    worker = FakeWorker()
    telemetry = Telemetry(Outlets(metric_readers=[PrometheusEndpoint("127.0.0.1", 0)]))
    service = Service(ServiceConfig(port=0, worker=(await worker.start(),)), telemetry)
    await service.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        await until_health(channel, INFERENCE, SERVING)
        stub = pb_grpc.InferenceServiceStub(channel)
        for _ in range(3):
            await read(stub.Generate(generate(max_tokens=6)))
        with pytest.raises(grpc.aio.AioRpcError):
            await read(stub.Generate(generate(max_tokens=100_000)))
    yield service
    await service.stop()
    await worker.stop()
    await asyncio.to_thread(telemetry.shutdown)


async def test_a_scrape_has_every_metric_of_the_scheduler():
    async with loaded_service() as service:
        text = await asyncio.to_thread(fetch, f"http://127.0.0.1:{service.metrics_port}/metrics")
    families = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    wanted = {m.prometheus_name for m in names.METRICS if m.service is not names.Service.WORKER}
    # Only what cannot have happened here has no series.
    assert wanted - families <= {"tidegate_requests_refused_total", "tidegate_host_kv_blocks"}
    assert 'tidegate_requests_total{outcome="finished"} 3.0' in text
    rpcs = 'tidegate_rpcs_total{rpc_method="tidegate.inference.v1.InferenceService/Generate",rpc_status_code='
    assert f'{rpcs}"OK"}} 3.0' in text and f'{rpcs}"INVALID_ARGUMENT"}} 1.0' in text
    assert re.search(r"^tidegate_deltas_total [1-9]", text, re.MULTILINE)
    assert 'tidegate_tenant_tokens_total{kind="output",tidegate_tenant="default"} 18.0' in text
    assert re.search(r'tidegate_worker_state\{state="ready",tidegate_worker_id="[^"]+"\} 1\.0', text)
    assert re.search(r'time_to_first_token_seconds_count\{[^}]*model="fake"\} 3\.0', text)
    assert "otel_scope" not in text


async def test_the_form_of_a_scrape_is_clean():
    needs("promtool")
    async with loaded_service() as service:
        text = await asyncio.to_thread(fetch, f"http://127.0.0.1:{service.metrics_port}/metrics")
    assert promtool("check", "metrics", text=text) == ""


def test_rules_are_valid_and_fire_when_they_should():
    assert "SUCCESS" in promtool("check", "rules", "rules.yaml")
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yaml")
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")


def test_rules_are_about_metrics_that_there_are():
    groups = yaml.safe_load((RULES / "rules.yaml").read_text())["groups"]
    expressions = " ".join(rule["expr"] for group in groups for rule in group["rules"])
    used = set(
        re.findall(r"\b(?:tidegate|gen_ai)_[a-z_]+", re.sub(r"\{[^}]*\}|by \([^)]*\)", "", expressions))
    )
    known = {metric.prometheus_name for metric in names.METRICS}
    known |= {f"{name}_{suffix}" for name in known for suffix in ("bucket", "count", "sum")}
    assert used
    assert used - known == set()


def test_an_address_in_use_is_an_error_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use; choose another --metrics-port"):
            PrometheusEndpoint("127.0.0.1", taken.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_prometheus_scrapes_a_scheduler_and_two_workers(tmp_path):
    program = needs("prometheus")
    model = save_tiny_model(tmp_path / "model")
    flags = ("--metrics-port", "0", "--served-model-name", "fake")
    async with (
        worker_process(model, *flags) as one,
        worker_process(model, *flags) as two,
        scheduler_process(
            tmp_path, "--metrics-port", "0", "--worker", one["address"], "--worker", two["address"]
        ) as scheduler,
        grpc.aio.insecure_channel(f"127.0.0.1:{scheduler['port']}") as channel,
    ):
        await until_health(channel, INFERENCE, SERVING)
        stub = pb_grpc.InferenceServiceStub(channel)
        await asyncio.gather(*(read(stub.Generate(generate(max_tokens=20, seed=i))) for i in range(8)))
        ports = [each["metrics_port"] for each in (scheduler, one, two)]
        async with prometheus(program, tmp_path, ports) as query:
            await until_holds(query, "count(up == 1) == 3")
            await until_holds(query, "count(tidegate_executor_steps_total > 0) == 2")
            await until_holds(query, 'sum(tidegate_executor_state{state="ready"}) == 2')
            await until_holds(query, 'sum(tidegate_worker_state{state="ready"}) == 2')
            # What the workers have sampled is at least what the scheduler has handed out.
            sampled = 'sum(tidegate_executor_tokens_total{kind="sampled"})'
            await until_holds(query, f"{sampled} >= sum(tidegate_output_tokens_total) > 0")
        for port in ports:
            text = await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}/metrics")
            assert promtool("check", "metrics", text=text) == ""


@contextlib.asynccontextmanager
async def prometheus(program: str, folder: Path, ports: list[int]) -> AsyncIterator[str]:
    """A Prometheus that scrapes these ports each second: the address of its queries."""
    targets = [f"127.0.0.1:{port}" for port in ports]
    config = {
        "global": {"scrape_interval": "1s"},
        "rule_files": [str(RULES / "rules.yaml")],
        "scrape_configs": [{"job_name": "tidegate", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}/api/v1/query"
    finally:
        process.terminate()
        await process.wait()


async def until_holds(query: str, expression: str) -> None:
    """Waits until a comparison gives a result; a false one gives none."""
    url = f"{query}?{urllib.parse.urlencode({'query': expression})}"
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError):
                if json.loads(await asyncio.to_thread(fetch, url))["data"]["result"]:
                    return
            await asyncio.sleep(0.3)
