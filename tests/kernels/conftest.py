"""Fixtures of the kernel tests, and where the Triton kernels' own tests run.

Triton decides at its import whether kernels run on a GPU or in its interpreter, by TRITON_INTERPRET. So the
tests in triton_kernels/ are collected in two cases only: in a process that has the variable
(test_triton_interpreted.py starts it), and where there is a GPU.
"""

import os

import pytest
import torch
from paged_cases import SHAPES, Shape

collect_ignore = []
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore.append("triton_kernels")


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def shape(request: pytest.FixtureRequest) -> Shape:
    """Each of the odd shapes in turn."""
    return request.param
