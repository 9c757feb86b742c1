"""Shows how far the workers of a local cluster are with loading."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tidegate_client.cli.local_cluster import LoadProgress
from tidegate_client.cli.screen import err


class LoadScreen:
    """One bar for each worker, on stderr, while its `with` block runs."""

    def __init__(self, *, enabled: bool = True) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[detail]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), console=err, disable=not enabled)
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, workers: list[LoadProgress]) -> None:
        """Draws the bars anew."""
        for worker in workers:
            if worker.worker not in self._bars:
                self._bars[worker.worker] = self._progress.add_task(worker.worker, total=1.0, detail="")
            bar = self._bars[worker.worker]
            self._progress.update(bar, completed=worker.share, detail=worker.detail)
