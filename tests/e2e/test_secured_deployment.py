"""A deployment in which every hop has TLS, certificates both ways, tokens and the secret."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from certificates import Authority
from e2e.deployment import deploy, random_prompts

from tidegate_client import AccessDeniedError, AsyncClient, Tls, UnavailableError

TOKEN, ADMIN_TOKEN, SECRET = "alice-0123456789", "admin-0123456789", "secret-0123456789"


async def test_tokens_come_through_when_every_hop_is_guarded(tiny_model, generated, tmp_path, monkeypatch):
    cluster, public = Authority(tmp_path, "cluster"), Authority(tmp_path, "public")
    (tmp_path / "tokens").write_text(f"{TOKEN} alice\n{ADMIN_TOKEN} operators admin\n")
    (tmp_path / "secret").write_text(SECRET)
    scheduler, worker, client = cluster.issue("scheduler"), cluster.issue("worker"), public.issue("client")
    shared = {"tls_ca": cluster.ca, "mtls": True, "secret_file": tmp_path / "secret"}
    for name, value in {"CA": cluster.ca, "CERT": client.cert, "KEY": client.key}.items():
        monkeypatch.setenv(f"TIDEGATE_TLS_{name}", str(value))  # of the client that deploy() makes
    monkeypatch.setenv("TIDEGATE_TOKEN", TOKEN)
    model = tiny_model("llama")
    prompts = random_prompts(4, 40, 251)
    async with deploy(
        model,
        worker={"tls_cert": worker.cert, "tls_key": worker.key, **shared},
        scheduler={
            "tls_cert": scheduler.cert,
            "tls_key": scheduler.key,
            "tls_client_ca": public.ca,
            "token_file": tmp_path / "tokens",
            "admin_port": 0,
            **shared,
        },
    ) as deployment:
        outputs = await deployment.generate_all(prompts, max_tokens=12)
        assert [output[0] for output in outputs] == generated(model, prompts, 12)
        address = f"localhost:{deployment.service.port}"
        tls = Tls(cluster.ca, client.cert, client.key)
        async with AsyncClient(address, token="unknown-012345678", tls=tls, retry=None) as unknown:
            with pytest.raises(AccessDeniedError) as caught:
                await unknown.list_models()
            assert caught.value.reason == "BAD_TOKEN"
        async with AsyncClient(address, tls=Tls(cluster.ca), retry=None, timeout_s=5) as nameless:
            with pytest.raises(UnavailableError):
                await nameless.list_models()


async def test_certificates_of_the_documented_commands_guard_every_hop(
    tiny_model, generated, tmp_path, monkeypatch
):
    page = (Path(__file__).parents[2] / "docs" / "threat-model.md").read_text()
    commands = re.search(r"```sh\n(umask.*?)```", page, re.DOTALL)
    assert commands is not None
    shell = await asyncio.create_subprocess_exec("bash", "-ec", commands[1], cwd=tmp_path)
    assert await shell.wait() == 0
    (tmp_path / "secret").write_text(SECRET)
    shared = {"tls_ca": tmp_path / "ca.pem", "mtls": True, "secret_file": tmp_path / "secret"}
    monkeypatch.setenv("TIDEGATE_TLS_CA", str(tmp_path / "ca.pem"))
    model = tiny_model("llama")
    prompts = random_prompts(1, 20, 251)
    async with deploy(
        model,
        worker={"tls_cert": tmp_path / "w.pem", "tls_key": tmp_path / "w.key", **shared},
        scheduler={
            "tls_cert": tmp_path / "s.pem",
            "tls_key": tmp_path / "s.key",
            "admin_port": 0,
            **shared,
        },
    ) as deployment:
        outputs = await deployment.generate_all(prompts, max_tokens=4)
    assert [output[0] for output in outputs] == generated(model, prompts, 4)
