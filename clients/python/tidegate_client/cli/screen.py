"""Where the command line writes: answers to stdout, everything else to stderr.

Owns the two consoles and how numbers of a generation are shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tidegate_client.types import Finished

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def write_text(text: str) -> None:
    """Writes a piece of a model's text as it is, at once."""
    out.file.write(text)
    out.file.flush()


class Flow:
    """Pieces of text in as few lines as the width allows, never broken within a piece."""

    def __init__(self, pieces: Sequence[Text | str], separator: str = "   ") -> None:
        self._pieces = [Text(piece) if isinstance(piece, str) else piece for piece in pieces]
        self._separator = separator

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines; a single one where the caller wants no breaks."""
        yield from self.lines(None if options.no_wrap else options.max_width)

    def lines(self, width: int | None) -> list[Text]:
        """The lines of at most so many columns. None: a single line."""
        lines = [Text()]
        for piece in self._pieces:
            if lines[-1]:
                lines[-1].append(self._separator)
            if width is not None and lines[-1] and lines[-1].cell_len + piece.cell_len > width:
                lines[-1].rstrip()
                lines.append(Text())
            lines[-1].append_text(piece)
        return lines


def print_stats(finished: Finished) -> None:
    """Writes a candidate's usage and timings to stderr; where that is no terminal, a line each."""
    for line in (usage_line(finished), timings_line(finished)):
        err.print(Flow(line.split(", "), ", "), soft_wrap=not err.is_terminal)


def usage_line(finished: Finished) -> str:
    """Returns the token counts of a candidate in one line."""
    usage = finished.usage
    line = (
        f"usage: {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.output_tokens} output tokens, ended by {finished.reason}"
    )
    return line + (f", preempted {usage.preemptions} times" if usage.preemptions else "")


def timings_line(finished: Finished) -> str:
    """Returns where a candidate's time went in one line."""
    timings = finished.timings
    parts = [
        f"queue {milliseconds(timings.queue_s)}",
        f"prefill {milliseconds(timings.prefill_s)}",
        f"decode {milliseconds(timings.decode_s)}",
    ]
    if timings.preempted_s:
        parts.append(f"preempted {milliseconds(timings.preempted_s)}")
    parts.append(f"time to first token {milliseconds(timings.time_to_first_token_s)}")
    rate = decode_rate(finished)
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    return "timings: " + ", ".join(parts)


def decode_rate(finished: Finished) -> float | None:
    """Returns tokens per second after the first one. None: there was only one."""
    later_tokens = finished.usage.output_tokens - 1
    return (
        later_tokens / finished.timings.decode_s
        if later_tokens > 0 and finished.timings.decode_s > 0
        else None
    )


def milliseconds(seconds: float) -> str:
    """Returns a duration for people."""
    if seconds >= 100:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
