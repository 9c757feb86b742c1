"""The command `python -m clients.conformance`: runs cases in all languages, prints and keeps results."""

from __future__ import annotations

import argparse
import sys

from clients.conformance.driver import LANGUAGES
from clients.conformance.runner import Outcome, Report, Runner
from clients.conformance.services import Services
from clients.conformance.suite import Case, load_cases
from clients.conformance.table import PAGE, page


def main() -> int:
    """Run, and say how it went: 0 if all passed."""
    options = _parser().parse_args()
    cases = [case for case in load_cases(options.case) if options.slow or not case.slow]
    given = dict(pair.split("=", 1) for pair in options.server)
    needed = {case.server for case in cases} - given.keys()
    with Services(needed) as services:
        runner = Runner({**services.addresses, **given})
        runner.take_references(cases)
        report = runner.run(options.language or list(LANGUAGES), cases, _progress)
    _summarize(report)
    if options.write_table:
        _write(report, cases)
    return 1 if report.failed or not report.outcomes else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m clients.conformance", description=__doc__)
    parser.add_argument(
        "--language", action="append", choices=list(LANGUAGES), help="only this one; may be repeated"
    )
    parser.add_argument("--case", default="*", metavar="PATTERN", help="cases to run, such as 'errors/*'")
    parser.add_argument("--slow", action="store_true", help="run the cases that take a minute, too")
    parser.add_argument(
        "--server", action="append", default=[], metavar="NAME=HOST:PORT", help="a server that runs already"
    )
    parser.add_argument("--write-table", action="store_true", help=f"write {PAGE.name} from the results")
    return parser


def _progress(outcome: Outcome) -> None:
    mark = "FAILED" if outcome.failures else "passed"
    sys.stdout.write(f"{mark} {outcome.language} {outcome.case} ({outcome.seconds:.1f} s)\n")
    sys.stdout.writelines(f"    {failure}\n" for failure in outcome.failures)
    sys.stdout.flush()


def _summarize(report: Report) -> None:
    for language, runtime in report.runtimes.items():
        mine = [outcome for outcome in report.outcomes if outcome.language == language]
        sys.stdout.write(f"{language}: {sum(not o.failures for o in mine)} of {len(mine)} ({runtime})\n")
    for language, why in report.skipped.items():
        sys.stdout.write(f"{language}: skipped, {why}\n")
    failed = len(report.failed)
    sys.stdout.write(
        f"{len(report.outcomes) - failed} passed, {failed} failed, {len(report.skipped)} skipped\n"
    )


def _write(report: Report, cases: list[Case]) -> None:
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(report, cases), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")


if __name__ == "__main__":
    sys.exit(main())
