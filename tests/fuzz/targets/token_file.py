"""Files of tokens and secrets, and the credential that a caller shows. No message tells a token."""

import random
import re
import tempfile
from pathlib import Path

from fuzz.mutations import mutate_bytes
from fuzz.target import Target

from scheduler_service.auth import Door, Need, read_secret, read_tokens
from scheduler_service.errors import ServiceError
from scheduler_service.watched_files import WatchedFiles
from worker_service import secret as worker_secret

_FILE = Path(tempfile.mkdtemp(prefix="tidegate-fuzz-")) / "tokens"
_DIGEST = "ab" * 32
SEEDS = [
    b"0123456789abcdefTOKEN tenant client # a comment\n\nfedcba9876543210TOKEN other admin\n",
    f"sha256:{_DIGEST} tenant\n".encode(),
    b"0123456789abcdefSECRET\nfedcba9876543210SECRET\n",
]
_LONG_WORD = re.compile(r"[^\s:`#]{16,}")


def make(rng: random.Random) -> bytes:
    """A file, whose first line is also shown as a credential."""
    seed = rng.choice(SEEDS)
    return mutate_bytes(rng, seed) if rng.random() < 0.95 else seed


def read(data: bytes) -> None:
    """Each reader takes the file or says by line what is wrong."""
    _FILE.write_bytes(data)
    refused = 0
    for reader in (read_tokens, read_secret, worker_secret.read_secret):
        try:
            reader(_FILE)
        except ValueError as error:
            refused += 1
            told = str(error).replace(str(_FILE), "")
            secrets = _LONG_WORD.findall(data.decode(errors="ignore"))
            assert not isinstance(error, UnicodeDecodeError) or "position" in told
            assert not any(word in told for word in secrets), told
    _FILE.write_bytes(SEEDS[0])
    door = Door({"s": Need.TENANT}, WatchedFiles([_FILE], lambda: read_tokens(_FILE)), None)
    shown = data.decode(errors="replace").splitlines()[:2]
    try:
        door.admit("s", [f"Bearer {word}" for word in shown])
    except ServiceError as error:
        assert not any(len(word) > 16 and word in error.message for word in shown)
    if refused == 3:
        raise ValueError("nobody takes it")


TARGET = Target("token_file", make, read, (ValueError,), 0.3)
