"""The Triton kernels' own tests pass under Triton's interpreter, in a process that has it from the start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNEL_TESTS = Path(__file__).parent / "triton_kernels"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", sorted(path.name for path in KERNEL_TESTS.glob("test_*.py")))
def test_kernels_equal_their_references(file: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(KERNEL_TESTS / file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
