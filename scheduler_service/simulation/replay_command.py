"""`python -m scheduler_service.simulation.replay_command`, which `tidegate replay` runs. Owns its options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from scheduler_service.core.errors import ConfigError
from scheduler_service.recording_file import RecordingError, read_records
from scheduler_service.replay import ReplayMismatchError, naming_versions, read_stops, replay
from scheduler_service.simulation.outcome import Outcome
from scheduler_service.simulation.plots import PlotsMissingError, draw
from scheduler_service.simulation.progress import progress_bar
from scheduler_service.simulation.recorded import RecordedRun, StepTimeFit, read_run
from scheduler_service.simulation.report import (
    FileError,
    Objective,
    Report,
    summarize,
    table,
    tenant_table,
    write_json,
)
from scheduler_service.simulation.scheduler_options import parse_flags, service_name
from scheduler_service.simulation.simulator import Simulation

_out = Console()
_err = Console(stderr=True)
_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def replay_file(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="What a scheduler wrote with --record FILE.")],
    partial: Annotated[
        bool, typer.Option("--partial", help="Play what is whole of a file that is cut or damaged.")
    ] = False,
    slo_ttft_ms: Annotated[float, typer.Option(help="Objective for the first token.")] = 1_000.0,
    slo_itl_ms: Annotated[float, typer.Option(help="Objective for a request's mean gap.")] = 50.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for plots, which need matplotlib.")] = None,
) -> None:
    """Play a scheduler's recording again, and check that it decides the same.

    With any option of the scheduler, such as --scheduling-policy fair, --admission predicted or
    --max-num-batched-tokens 512, also simulate what would have happened with it: the recorded requests come
    as they came, and steps take as long as the recorded ones did by their size. "simulated" is the same with
    the recorded options: compare with that, since it has the simulation's own error.
    """
    options = parse_flags(context.args)
    if not options:
        summary = replay(file, partial)
        _out.print(
            f"identical: {summary.plans} plans of {summary.calls} calls in {summary.seconds:.1f} s; "
            f"{summary.accepted} requests accepted, {summary.refused} refused",
            soft_wrap=True,
        )
        _tell_unfinished(summary.unfinished, "")
        return
    with naming_versions(file):
        run = read_run(read_records(file, partial), read_stops(file, partial))
    fit = run.fit()
    outcomes = {"recorded": run.outcome, **_simulate(run, fit, options)}
    objective = Objective(slo_ttft_ms / 1e3, slo_itl_ms / 1e3)
    reports = {name: summarize(outcome, objective) for name, outcome in outcomes.items()}
    _show(reports, objective, fit, json_file)
    _tell_unfinished(len(run.unfinished), "; all columns leave them out")
    if plots is not None:
        for path in draw(outcomes, plots):
            _out.print(f"wrote {path}", soft_wrap=True)


def _simulate(run: RecordedRun, fit: StepTimeFit, options: dict[str, Any]) -> dict[str, Outcome]:
    """The recorded load with the recorded options, and with others in place of some."""
    if run.config is None:
        raise RecordingError("the recording has no scheduler in it")
    load = run.load(fit.ratios)
    configs = {
        "simulated": run.config,
        ", ".join(f"{service_name(name)}={value}" for name, value in options.items()): replace(
            run.config, **options
        ),
    }
    outcomes = {}
    for name, config in configs.items():
        with progress_bar(name, len(load.arrivals), _err) as on_progress:
            outcome = Simulation(config, [], fit.step_time, load).run(on_progress)
        # Nobody knows how long those would have become whose end was not recorded.
        outcome.finished = [each for each in outcome.finished if each.candidate not in run.unfinished]
        outcomes[name] = outcome
    return outcomes


def _tell_unfinished(count: int, more: str) -> None:
    if count:
        what = "request" if count == 1 else "requests"
        _out.print(f"the recording ends abruptly: {count} {what} unfinished{more}", soft_wrap=True)


def _show(reports: dict[str, Report], objective: Objective, fit: StepTimeFit, json_file: Path | None) -> None:
    _out.print(table(reports, objective), width=max(_out.width, 24 + 24 * len(reports)), crop=False)
    for name, report in reports.items():
        if len(report.tenants) > 1:
            _out.print(name)
            _out.print(tenant_table(report))
    time = fit.step_time
    _out.print(
        f"step: {time.base_s * 1e3:.3f} ms + {time.per_token_s * 1e6:.2f} us a token + "
        f"{time.per_kv_token_s * 1e9:.2f} ns a token with KV + {time.per_pair_s * 1e9:.3f} ns a pair; "
        f"mean error {fit.mean_error:.1%} over {len(fit.ratios)} steps",
        soft_wrap=True,
    )
    if json_file is not None:
        write_json(json_file, reports)


def main() -> None:
    """Runs the command. Exit status: 1 for a difference, 2 for a bad file or option."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=_SETTINGS)(replay_file)
    try:
        app()
    except ReplayMismatchError as error:
        status, message = 1, str(error)
    except (RecordingError, ConfigError, PlotsMissingError, FileError) as error:
        status, message = 2, str(error)
    except OSError as error:  # of the recording, or of plots
        status, message = 2, f"{error.filename}: {error.strerror}"
    else:
        return
    _err.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
