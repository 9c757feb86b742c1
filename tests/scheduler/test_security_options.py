"""Which combinations of security options the scheduler service starts with."""

from __future__ import annotations

import pytest

from scheduler_service.config import load_config
from scheduler_service.option_sources import ConfigError

TLS = "--tls-cert c --tls-key k"


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--tls-cert c", ["tls_cert and tls_key"]),
        ("--tls-key k", ["tls_cert and tls_key"]),
        (f"{TLS} --tls-ca a --mtls", ["admin_port"]),
        ("--tls-ca a --mtls --admin-port 0", ["tls_cert"]),
        (f"{TLS} --mtls --admin-port 0", ["tls_ca"]),
        ("--tls-client-ca a --secret-file s", ["tls_cert"]),
        (f"{TLS} --tls-client-ca a", ["admin API", "secret_file"]),
        # Beyond loopback.
        ("--host 10.0.0.1", ["'10.0.0.1'", "not encrypted", "--insecure"]),
        ("--admin-host 10.0.0.1 --admin-port 0", ["admin_host = '10.0.0.1'", "not encrypted"]),
        (f"--host 10.0.0.1 {TLS}", ["admin API", "secret_file"]),
        ("--host 10.0.0.1 --insecure --token-file t", ["unencrypted", "tls_cert"]),
        ("--host 10.0.0.1 --insecure --secret-file s", ["unencrypted", "tls_cert"]),
        ("--secret-file s --worker 10.0.0.2:50061", ["10.0.0.2:50061", "unencrypted", "tls_ca"]),
    ],
)
def test_doors_that_would_stay_open_are_refused(flags, parts):
    with pytest.raises(ConfigError) as caught:
        load_config(flags.split())
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--token-file t --secret-file s",
        "--host ::1 --token-file t",
        "--host localhost --secret-file s --worker localhost:1,[::1]:2",
        f"--host 10.0.0.1 {TLS} --token-file t",
        f"--host 10.0.0.1 {TLS} --secret-file s",
        f"--host 10.0.0.1 {TLS} --tls-ca a --mtls --admin-port 0",
        # The admin API stays on this machine.
        f"--host 10.0.0.1 {TLS} --admin-host 127.0.0.1 --admin-port 0",
        "--host 10.0.0.1 --insecure --secret-file s --admin-host 127.0.0.1 --admin-port 0",
        f"--host 10.0.0.1 {TLS} --insecure",
        "--host 10.0.0.1 --insecure",
        "--secret-file s --tls-ca a --worker 10.0.0.2:50061",
        f"{TLS} --tls-client-ca a --admin-port 0",
    ],
)
def test_safe_combinations_are_taken(flags):
    load_config(flags.split())


def test_security_options_come_from_variables_and_files_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDEGATE_TOKEN_FILE", "/tokens")
    (tmp_path / "c.yaml").write_text("secret-file: /secret\nmtls: false\n")
    config = load_config(["--config", str(tmp_path / "c.yaml")])
    assert (str(config.token_file), str(config.secret_file), config.mtls) == ("/tokens", "/secret", False)
