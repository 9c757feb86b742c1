"""Shows how far a run is: one bar."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tidegate_client.bench.passage import Passage


class ProgressBar:
    """A bar for the run that is under way, while its `with` block runs."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, TextColumn("{task.fields[failed]}"), console=console, transient=True
        )
        self._task: TaskID | None = None
        self._failed = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, title: str) -> None:
        """Another run starts, with its warm-up."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._failed = 0
        self._task = self._progress.add_task(title, total=None, failed="")

    def start(self, num_requests: int) -> None:
        """The warm-up is over."""
        if self._task is not None:
            self._progress.reset(self._task, total=num_requests)

    def advance(self, passage: Passage) -> None:
        """A request has ended."""
        if self._task is not None:
            self._failed += bool(passage.error)
            self._progress.update(
                self._task, advance=1, failed=f"{self._failed} failed" if self._failed else ""
            )
