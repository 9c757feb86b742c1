"""The GPU's check reads a device's timeline rightly, and all of it can be gone through on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.generation import step_gaps_us

FIRST = "Memcpy HtoD (Pinned -> Device)"
ROOT = Path(__file__).parents[2]


def test_gaps_are_between_the_last_work_of_a_step_and_the_first_of_the_next():
    work = [
        (FIRST, 100.0, 102.0),
        ("gemm", 102.0, 150.0),
        ("beside", 110.0, 160.0),  # ends later than what began after it
        ("Memcpy HtoD (Pageable -> Device)", 155.0, 156.0),
        (FIRST, 167.0, 168.0),
        ("gemm", 168.0, 200.0),
        (FIRST, 199.0, 201.0),  # begins before all is done: no gap
    ]
    assert step_gaps_us(work) == [7.0, 0.0]
    assert step_gaps_us(reversed(work)) == [7.0, 0.0]
    assert step_gaps_us([("gemm", 1.0, 2.0)]) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dry_run_goes_through_all_parts():
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "protos")]),
    }
    command = [sys.executable, "-m", "benchmarks.gpu.check", "--dry-run"]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "WRONG" not in result.stdout
    assert "right  error 0.0e+00 of at most 2e-05  graph, 1 rows, float32 KV" in result.stdout
    rows = [line.split("|")[1:-1] for line in result.stdout.splitlines() if line.startswith("| tiny")]
    assert [row[2].strip() for row in rows] == ["on", "off"]
    assert {row[6].strip() for row in rows} == {"3 of 3"}
