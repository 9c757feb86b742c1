"""Why nothing could be measured. The texts are for people."""

from __future__ import annotations


class BenchError(Exception):
    """The server answered nothing."""


class PlanError(BenchError):
    """What was asked for can't be measured."""


class EndpointError(BenchError):
    """The endpoint can't be reached, or is none."""
