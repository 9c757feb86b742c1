"""A table that leaves out its least important columns where the terminal is too narrow for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = 2  # characters between columns

RowT = TypeVar("RowT")


@dataclass(frozen=True, slots=True)
class Column(Generic[RowT]):
    """A title, and what a row has under it."""

    title: str
    cell: Callable[[RowT], Text | str]
    rank: int = 0
    """Of two columns the one with the higher rank is left out first; 0 stays."""
    number: bool = False
    """Whether it stands to the right."""
    optional: bool = False
    """Whether it is left out where no row has anything under it."""


class FittingTable(Generic[RowT]):
    """Rows under columns. `last_line`: said below them, such as how many more there are."""

    def __init__(
        self, columns: Sequence[Column[RowT]], rows: Sequence[RowT], last_line: str | None = None
    ) -> None:
        filled = [(column, [_text(column.cell(row)) for row in rows]) for column in columns]
        self._columns = [each for each in filled if not each[0].optional or any(each[1])]
        self._last_line = last_line

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table with as many columns as fit."""
        shown = list(self._columns)
        while _width(shown) > options.max_width and any(column.rank for column, _ in shown):
            shown.remove(max(shown, key=lambda each: each[0].rank))
        table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold dim", pad_edge=False)
        for column, _ in shown:
            table.add_column(
                column.title, justify="right" if column.number else "left", no_wrap=True, overflow="ellipsis"
            )
        for cells in zip(*(cells for _, cells in shown), strict=True):
            table.add_row(*cells)
        yield table
        if self._last_line is not None:
            yield Text(self._last_line, "dim")


def _width(columns: Sequence[tuple[Column[RowT], list[Text]]]) -> int:
    widths = [max(len(column.title), *(cell.cell_len for cell in cells), 0) for column, cells in columns]
    return sum(widths) + _GAP * (len(widths) - 1)


def _text(cell: Text | str) -> Text:
    return Text(cell) if isinstance(cell, str) else cell
