"""`python -m scheduler_service.simulation`, which `tidegate simulate` runs. Owns options and their checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import ConfigError
from scheduler_service.simulation.modelled_worker import StepTime
from scheduler_service.simulation.outcome import Outcome
from scheduler_service.simulation.plots import PlotsMissingError, draw
from scheduler_service.simulation.progress import progress_bar
from scheduler_service.simulation.report import (
    FileError,
    Objective,
    Report,
    summarize,
    table,
    tenant_table,
    write_json,
)
from scheduler_service.simulation.scheduler_options import parse
from scheduler_service.simulation.simulator import Simulation, fleet
from scheduler_service.simulation.workload import (
    Lengths,
    Workload,
    WorkloadError,
    draw_arrivals,
    draw_tenants,
    read_trace,
)

_out = Console()
_err = Console(stderr=True)
_HASH_KEY = b"simulation"  # runs must agree


def simulate(
    requests: Annotated[int, typer.Option(min=1, help="Requests to draw.")] = 2_000,
    rate: Annotated[float, typer.Option(help="Requests a second, all workers together.")] = 10.0,
    burstiness: Annotated[float, typer.Option(help="1 is Poisson, more comes in bursts, 0 is even.")] = 1.0,
    prompt: Annotated[str, typer.Option(help="Prompt lengths.")] = "lognormal:800:0.8",
    output: Annotated[str, typer.Option(help="Output lengths.")] = "lognormal:250:0.8",
    trace: Annotated[
        Path | None,
        typer.Option(help="CSV of arrival_s, prompt_tokens, output_tokens[, tenant], in place of drawing."),
    ] = None,
    tenants: Annotated[str, typer.Option(help="Shares of the requests: NAME=SHARE,...")] = "default=1",
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens that prompts of a group share.")] = 0,
    prefix_groups: Annotated[int, typer.Option(min=1, help="Number of such groups.")] = 1,
    max_tokens: Annotated[
        int, typer.Option(min=0, help="What requests ask for. 0: exactly what the model gives them.")
    ] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 1,
    blocks: Annotated[int, typer.Option(min=2, help="KV blocks of a worker.")] = 16_385,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    host_blocks: Annotated[
        int, typer.Option(min=0, help="Blocks of a worker in host memory, for the KV of preempted requests.")
    ] = 0,
    block_copy_ms: Annotated[
        float, typer.Option(min=0, help="To copy a block to host memory or back. 0: free, and not measured.")
    ] = 0.04,
    slots: Annotated[int, typer.Option(min=1, help="Slots of a worker.")] = 256,
    max_model_len: Annotated[int, typer.Option(min=2, help="Longest sequence, in tokens.")] = 8_192,
    step_base_ms: Annotated[float, typer.Option(min=0, help="A step's time without any token.")] = 6.0,
    step_token_us: Annotated[float, typer.Option(min=0, help="More for each token computed.")] = 25.0,
    step_kv_ns: Annotated[
        float, typer.Option(min=0, help="More for each token that attention reads.")
    ] = 40.0,
    link_ms: Annotated[
        float, typer.Option(min=0, help="A plan's way to a worker, and as long for its result.")
    ] = 0.0,
    slo_ttft_ms: Annotated[float, typer.Option(help="Objective for the first token.")] = 1_000.0,
    slo_itl_ms: Annotated[float, typer.Option(help="Objective for a request's mean gap.")] = 50.0,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the scheduler: NAME=VALUE.")
    ] = None,
    sweep: Annotated[str, typer.Option(help="Compares values of an option: NAME=VALUE,VALUE,...")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same run.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for plots, which need matplotlib.")] = None,
) -> None:
    """Runs the real scheduler against modelled workers, on a clock of its own.

    Lengths are fixed:N, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEAN:SIGMA. The step's default time
    is about that of a model of 8 billion parameters in bf16 on one accelerator with 3.3 TB/s and 600 TFLOP/s.
    """
    longest = max_model_len // 2
    if trace is not None:
        load = read_trace(trace, longest, seed)
    else:
        random = np.random.default_rng(seed)
        load = Workload(
            arrivals=draw_arrivals(requests, rate, burstiness, random),
            prompts=Lengths.parse(prompt, longest).draw(requests, random),
            outputs=Lengths.parse(output, longest).draw(requests, random),
            tenants=draw_tenants(tenants, requests, random),
            prefixes=random.integers(0, prefix_groups, requests),
            shared_tokens=shared_prefix,
            seed=seed,
        )
    specs = fleet(
        workers,
        num_blocks=blocks,
        block_size=block_size,
        num_slots=slots,
        max_batched_tokens=1 << 20,
        max_in_flight=8,
        max_model_len=max_model_len,
        vocab_size=1 << 20,
        num_host_blocks=host_blocks,
        block_copy_ms=block_copy_ms,
    )
    times = StepTime(step_base_ms / 1e3, step_token_us / 1e6, step_kv_ns / 1e9)
    objective = Objective(slo_ttft_ms / 1e3, slo_itl_ms / 1e3)
    outcomes: dict[str, Outcome] = {}
    for name, config in _configs(option or [], sweep).items():
        simulation = Simulation(config, specs, times, load, max_tokens or None, link_s=link_ms / 1e3)
        with progress_bar(name, len(load), _err) as on_progress:
            outcomes[name] = simulation.run(on_progress)
    reports = {name: summarize(outcome, objective) for name, outcome in outcomes.items()}
    _show(reports, objective, json_file)
    if plots is not None:
        for path in draw(outcomes, plots):
            _out.print(f"wrote {path}", soft_wrap=True)


def _configs(settings: list[str], sweep: str) -> dict[str, SchedulerConfig]:
    """One configuration, or one for each value of the option that is swept."""
    given = dict(parse(text) for text in settings)
    if not sweep:
        return {"simulation": SchedulerConfig(**given, hash_key=_HASH_KEY)}
    name, _, values = sweep.partition("=")
    return {
        f"{name}={value}": SchedulerConfig(
            **{**given, **dict([parse(f"{name}={value}")])}, hash_key=_HASH_KEY
        )
        for value in values.split(",")
    }


def _show(reports: dict[str, Report], objective: Objective, json_file: Path | None) -> None:
    # Also into a pipe, a column is as wide as its name.
    _out.print(table(reports, objective), width=max(_out.width, 24 + 24 * len(reports)), crop=False)
    for name, report in reports.items():
        if len(report.tenants) > 1:
            _out.print(name)
            _out.print(tenant_table(report))
    if json_file is not None:
        write_json(json_file, reports)


def main() -> None:
    """Runs the command; wrong options become one line on stderr and exit code 2."""
    try:
        typer.run(simulate)
    except (ConfigError, WorkloadError, PlotsMissingError, FileError) as error:
        message = str(error)
    except OSError as error:  # of plots
        message = f"{error.filename}: {error.strerror}"
    else:
        return
    _err.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
