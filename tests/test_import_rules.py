"""Import rules that a list of forbidden packages can't state: what is allowed, and in which files."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GRPC_FILES = ("*_api.py", "*_link.py", "server.py", "registration.py", "errors.py")
TELEMETRY_FILES = ("telemetry*.py",)
IMPURE = {"asyncio", "logging", "random", "select", "socket", "subprocess", "threading", "time", "datetime"}


def imports_of(path: Path) -> set[str]:
    """Top-level names of all that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: imports are absolute"
            names.add(node.module.partition(".")[0])
    return names


def files_that_import(package: str, *, under: str) -> list[Path]:
    return [path for path in sorted((ROOT / under).rglob("*.py")) if package in imports_of(path)]


@pytest.mark.parametrize(
    ("folder", "package", "allowed"),
    [
        ("scheduler_service", "grpc", GRPC_FILES),
        ("worker_service", "grpc", GRPC_FILES),
        ("scheduler_service", "opentelemetry", TELEMETRY_FILES),
        ("worker_service", "opentelemetry", TELEMETRY_FILES),
        ("clients/openai_gateway", "grpc", ("upstream.py",)),
        ("kernels", "numba", ("cpu*.py",)),
        ("kernels", "llvmlite", ("cpu*.py",)),
        ("clients/python/tidegate_client", "httpx", ("openai_target.py",)),
        ("clients/python/tidegate_client", "matplotlib", ("plots.py",)),
        ("clients/python/tidegate_client", "opentelemetry", ("trace_context.py",)),
        ("clients/python/tidegate_client", "tokenizers", ("prompts.py",)),
    ],
)
def test_a_library_stays_in_its_files(folder: str, package: str, allowed: tuple[str, ...]) -> None:
    strays = [
        str(path.relative_to(ROOT))
        for path in files_that_import(package, under=folder)
        if not any(path.match(pattern) for pattern in allowed)
    ]
    assert strays == [], f"{package} belongs in {', '.join(allowed)}"


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("scheduler_service/core", (set(sys.stdlib_module_names) - IMPURE) | {"numpy", "scheduler_service"}),
        (
            "kernels/tidegate_kernels",
            set(sys.stdlib_module_names)
            | {"torch", "triton", "numpy", "numba", "llvmlite", "tidegate_kernels"},
        ),
        (
            "clients/python/tidegate_client",
            set(sys.stdlib_module_names)
            | {"tidegate", "tidegate_client", "grpc", "google", "typer", "click", "rich", "uvloop"}
            | {"httpx", "matplotlib", "opentelemetry", "tokenizers"},
        ),
    ],
)
def test_a_package_imports_only_what_it_may(folder: str, allowed: set[str]) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert {
        str(path.relative_to(ROOT)): names - allowed
        for path in files
        if (names := imports_of(path)) - allowed
    } == {}
