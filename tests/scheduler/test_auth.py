"""Token files, secrets, the rules of a door, and files that change."""

from __future__ import annotations

import hashlib
import os

import pytest

from scheduler_service import auth, watched_files
from scheduler_service.auth import Door, Identity, Need, bound_tenant, read_secret, read_tokens, set_caller
from scheduler_service.errors import ServiceError
from scheduler_service.watched_files import WatchedFiles

ALICE, ROOT, SECRET, OLD_SECRET = (
    "alice-0123456789",
    "root-0123456789a",
    "secret-01234567+/==",
    "older-0123456789",
)
HASHED = "hashed-0123456789"
TOKENS = f"""# comment
{ALICE} alice   # the first

{ROOT}\toperators admin
sha256:{hashlib.sha256(HASHED.encode()).hexdigest()} bob client
"""


@pytest.fixture
def door(tmp_path) -> Door:
    tokens, secret = tmp_path / "tokens", tmp_path / "secret"
    tokens.write_text(TOKENS)
    secret.write_text(f"{SECRET}\n{OLD_SECRET}\n")
    needs = {"open": Need.NOTHING, "inference": Need.TENANT, "admin": Need.ADMIN}
    return Door(
        needs,
        WatchedFiles([tokens], lambda: read_tokens(tokens)),
        WatchedFiles([secret], lambda: read_secret(secret)),
    )


CLIENT, OPERATOR, SERVICE = Identity("alice", False), Identity("operators", True), Identity(None, True)
DENIED = "PERMISSION_DENIED"


@pytest.mark.parametrize(
    ("service", "token", "answer"),
    [
        ("open", None, None),
        ("open", "nonsense", None),
        ("inference", ALICE, CLIENT),
        ("inference", HASHED, Identity("bob", False)),
        ("inference", ROOT, OPERATOR),
        ("inference", SECRET, DENIED),
        ("inference", None, "MISSING_TOKEN"),
        ("inference", ALICE + "x", "BAD_TOKEN"),
        ("inference", "", "BAD_TOKEN"),
        # The hash in the file is not a token itself.
        ("inference", f"sha256:{hashlib.sha256(HASHED.encode()).hexdigest()}", "BAD_TOKEN"),
        ("admin", ALICE, DENIED),
        ("admin", ROOT, OPERATOR),
        ("admin", SECRET, SERVICE),
        ("admin", OLD_SECRET, SERVICE),
        ("admin", None, "MISSING_TOKEN"),
        ("a service that is not named", None, "MISSING_TOKEN"),
        ("a service that is not named", ALICE, CLIENT),
    ],
)
def test_who_may_call_what(door, service, token, answer):
    authorization = [] if token is None else [f"Bearer {token}"]
    if answer is None or isinstance(answer, Identity):
        assert door.admit(service, authorization) == answer
    else:
        with pytest.raises(ServiceError) as caught:
            door.admit(service, authorization)
        assert caught.value.reason.value == answer


@pytest.mark.parametrize(
    ("authorization", "known"),
    [
        ([f"bearer {ALICE}"], True),
        ([f"Bearer  {ALICE} "], True),
        ([ALICE], False),
        ([f"Basic {ALICE}"], False),
        ([f"Bearer {ALICE}", f"Bearer {ALICE}"], False),
        (["Bearer"], False),
    ],
)
def test_one_bearer_token_is_expected(door, authorization, known):
    if known:
        assert door.admit("inference", authorization) == CLIENT
    else:
        with pytest.raises(ServiceError) as caught:
            door.admit("inference", authorization)
        assert caught.value.reason.value == "BAD_TOKEN"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (ALICE, ["line 3", "token tenant"]),
        (f"{ALICE} alice root", ["line 3", "client", "admin"]),
        (f"{ALICE} alice client more", ["line 3"]),
        ("short alice", ["line 3", "5 characters", "at least 16"]),
        ("tökens-0123456789 alice", ["line 3", "A-Z"]),
        ("sha256:abc alice", ["line 3", "64 hexadecimal"]),
        (f"{ROOT} twice", ["line 3", "twice"]),
        (f"{ALICE} {'x' * 129}", ["line 3", "129 characters", "at most 128"]),
    ],
)
def test_errors_in_a_token_file_name_the_line_and_no_token(tmp_path, line, parts):
    path = tmp_path / "tokens"
    path.write_text(f"# tokens\n{ROOT} operators admin\n{line}\n")
    with pytest.raises(ValueError) as caught:
        read_tokens(path)
    for part in parts:
        assert part in str(caught.value)
    assert line.split()[0] not in str(caught.value)


@pytest.mark.parametrize(
    "content", ["", "# nothing\n", f"{SECRET} tenant\n", "short\n", "sha256:" + "0" * 64]
)
def test_a_secret_file_must_have_a_secret_a_line(tmp_path, content):
    path = tmp_path / "secret"
    path.write_text(content)
    with pytest.raises(ValueError, match=str(path)):
        read_secret(path)


def test_the_first_secret_is_shown_and_is_not_printed(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"# new\n{SECRET}\n{OLD_SECRET}\n")
    secret = read_secret(path)
    assert secret.own == SECRET
    assert SECRET not in repr(secret)


def test_a_request_has_the_tenant_of_its_token():
    set_caller(CLIENT)
    assert bound_tenant("") == bound_tenant("alice") == "alice"
    assert auth.tenant_limit() == "alice"
    with pytest.raises(ServiceError) as caught:
        bound_tenant("bob")
    assert caught.value.reason.value == "TENANT_MISMATCH"
    set_caller(OPERATOR)
    assert bound_tenant("") == "operators"
    assert auth.tenant_limit() is None
    set_caller(None)
    assert bound_tenant("anyone") == "anyone"
    assert auth.tenant_limit() is None


@pytest.fixture
def at_each_look(monkeypatch):
    """Files are looked at whenever their value is asked for."""
    monkeypatch.setattr(watched_files, "_LOOK_INTERVAL_S", 0.0)


def test_a_changed_file_is_read_again(tmp_path, at_each_look):
    path = tmp_path / "file"
    path.write_text("one")
    reads = []
    watched = WatchedFiles([path], lambda: reads.append(1) or path.read_text())
    assert [watched.get(), watched.get(), len(reads)] == ["one", "one", 1]
    path.write_text("another")
    assert [watched.get(), watched.get(), len(reads)] == ["another", "another", 2]
    # As editors and Kubernetes do it: a new file takes the name, here with size and time of the old one.
    stamp = path.stat()
    (tmp_path / "new").write_text("replace")
    os.utime(tmp_path / "new", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    (tmp_path / "new").replace(path)
    assert watched.get() == "replace"


def test_an_unusable_file_leaves_the_last_good_value(tmp_path, at_each_look, caplog):
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    watched = WatchedFiles([path], lambda: read_tokens(path))
    good = watched.get()
    path.write_text(TOKENS + "short line\n")
    assert watched.get() is good
    path.unlink()
    assert watched.get() is good
    path.write_text(f"{ALICE} alice\n")
    assert len(watched.get()) == 1
    events = [record.getMessage() for record in caplog.records]
    assert events.count("files_unusable") == 2
    assert ALICE not in caplog.text


def test_files_are_looked_at_once_in_an_interval(tmp_path, monkeypatch):
    monkeypatch.setattr(watched_files, "_LOOK_INTERVAL_S", 1e9)
    path = tmp_path / "file"
    path.write_text("one")
    watched = WatchedFiles([path], path.read_text)
    path.write_text("another")
    assert watched.get() == "one"
