"""Fixtures of the kernel tests."""

import pytest
from paged_cases import SHAPES, Shape


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def shape(request: pytest.FixtureRequest) -> Shape:
    """Each of the odd shapes in turn."""
    return request.param
