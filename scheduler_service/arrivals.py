"""Owns the count of candidates that are on their way to the queue: they take up room before they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Arrivals:
    """Candidates on their way, by tenant."""

    def __init__(self) -> None:
        self.num = 0
        self._of_tenant: Counter[str] = Counter()

    def of(self, tenant: str) -> int:
        """Those of a tenant."""
        return self._of_tenant.get(tenant, 0)

    def add(self, tenant: str, num: int) -> None:
        """So many more are on their way."""
        self.num += num
        self._of_tenant[tenant] += num

    def remove(self, tenant: str, num: int) -> None:
        """So many have come, or never will."""
        self.num -= num
        self._of_tenant[tenant] -= num
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    @contextmanager
    def during(self, tenant: str, num: int) -> Iterator[None]:
        """They are on their way inside the block."""
        self.add(tenant, num)
        try:
            yield
        finally:
            self.remove(tenant, num)
