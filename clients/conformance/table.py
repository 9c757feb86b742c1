"""Owns docs/clients/conformance.md: the results of a run, as a page. It is written, never edited."""

from __future__ import annotations

from pathlib import Path

from clients.conformance.runner import Report
from clients.conformance.suite import Case

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients" / "conformance.md"
_TITLES = {"python": "Python", "node": "Node", "go": "Go", "cpp": "C++", "java": "Java", "ruby": "Ruby"}


def page(report: Report, cases: list[Case]) -> str:
    """The whole page, in Markdown."""
    languages = [*report.runtimes, *report.skipped]
    outcomes = {(outcome.case, outcome.language): outcome for outcome in report.outcomes}
    lines = [
        "# Conformance",
        "",
        "Written by `python -m clients.conformance --slow --write-table`. The cases are in",
        "[clients/conformance](../../clients/conformance/README.md). All run against real services with the",
        "demo model, but `peer` and some of `attach`, which need a server that says what no real one does.",
        "",
        "| language | built with | passed |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {_TITLES[language]} | {_built_with(report, language)} | {_passed(report, language)} |"
        for language in languages
    ]
    lines += ["", "| case | what must hold | " + " | ".join(_TITLES[name] for name in languages) + " |"]
    lines.append("| --- | --- |" + " --- |" * len(languages))
    for case in cases:
        marks = [_mark(outcomes.get((case.name, language))) for language in languages]
        lines.append(f"| `{case.name}` | {case.what} | " + " | ".join(marks) + " |")
    return "\n".join(lines) + "\n"


def _built_with(report: Report, language: str) -> str:
    return report.runtimes.get(language) or f"skipped: {report.skipped[language]}"


def _passed(report: Report, language: str) -> str:
    mine = [outcome for outcome in report.outcomes if outcome.language == language]
    return f"{sum(not outcome.failures for outcome in mine)} of {len(mine)}" if mine else "not run"


def _mark(outcome: object) -> str:
    if outcome is None:
        return "not run"
    return "FAILS" if getattr(outcome, "failures", ()) else "yes"
