"""What is installed from a wheel is all of it: every package, and its types."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "tidegate": ROOT / "protos/tidegate",
    "tidegate_telemetry": ROOT / "tidegate_telemetry",
    "scheduler_service": ROOT / "scheduler_service",
    "worker_service": ROOT / "worker_service",
    "tidegate_kernels": ROOT / "kernels/tidegate_kernels",
    "tidegate_client": ROOT / "clients/python/tidegate_client",
    "openai_gateway": ROOT / "clients/openai_gateway/openai_gateway",
}


@pytest.mark.slow
def test_the_wheel_holds_every_package_and_nothing_else(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("tidegate-*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        f"{package}/{path.relative_to(folder)}"
        for package, folder in PACKAGES.items()
        for pattern in ("*.py", "*.pyi", "*.proto", "py.typed")
        for path in folder.rglob(pattern)
    }
    page = ROOT / "scheduler_service/console/page"
    expected |= {f"scheduler_service/console/page/{path.name}" for path in page.iterdir()}
    assert "scheduler_service/console/page/index.html" in expected
    assert names == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
