"""Where the kernels under test run."""

import os

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """The CPU under the interpreter, else the GPU."""
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture(params=[torch.float32, torch.float16], ids=["fp32", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """What the interpreter computes rightly; it multiplies bf16 tiles wrongly."""
    return request.param
