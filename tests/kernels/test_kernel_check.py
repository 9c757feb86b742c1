"""The Triton kernels compile for GPUs that are not here, and spill no registers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"


def check(*words: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "tidegate_kernels.check", *words],
        env={**environment, "PYTHONPATH": str(KERNELS), **({"TRITON_INTERPRET": "1"} if interpret else {})},
        capture_output=True,
        text=True,
    )


def test_a_variant_compiles_without_spills() -> None:
    result = check("D=64 window", "decode bf16 cache=bf16")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split() for line in result.stdout.splitlines()[1:]]
    assert [row[-4] for row in rows] == ["sm_80", "sm_90"]
    assert all(int(row[-3]) > 16 and int(row[-2]) > 1024 and int(row[-1]) == 0 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_variants_compile_without_spills() -> None:
    result = check()
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.splitlines()) > 150


def test_a_name_that_no_variant_has_is_refused() -> None:
    result = check("nonesuch")
    assert (result.returncode, result.stdout) == (1, "")
    assert "no variant's name contains ['nonesuch']" in result.stderr


def test_the_interpreter_is_refused() -> None:
    result = check(interpret=True)
    assert result.returncode == 1
    assert "unset TRITON_INTERPRET" in result.stderr
