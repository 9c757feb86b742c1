"""`tidegate bench`: throughput and latencies of a served model, over gRPC or any OpenAI endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from tidegate_client.bench import plots as pictures
from tidegate_client.bench import report
from tidegate_client.bench.endpoint import API_KEY_VARIABLE, Endpoint
from tidegate_client.bench.errors import BenchError, EndpointError, PlanError
from tidegate_client.bench.figures import Objective
from tidegate_client.bench.load import ClosedLoop, Load, OpenLoop
from tidegate_client.bench.progress import ProgressBar
from tidegate_client.bench.run import Run
from tidegate_client.bench.sitting import Plan, measure
from tidegate_client.bench.workload import PRESETS, Lengths, Shape, Workload, from_file, from_shape
from tidegate_client.channel import DEFAULT_ADDRESS
from tidegate_client.cli import options
from tidegate_client.cli.demo_model import find_model
from tidegate_client.cli.failures import (
    BAD_REQUEST,
    INTERRUPTED,
    SERVER_FAILED,
    UNREACHABLE,
    Failure,
    unreadable,
)
from tidegate_client.cli.load_screen import LoadScreen
from tidegate_client.cli.local_cluster import ClusterOptions, LocalCluster
from tidegate_client.cli.screen import err, out
from tidegate_client.cli.serve import Device, named_flags, stop_on_signals

_DEFAULT_SESSIONS = 64
_DEFAULT_STREAMS = 16

GivenT = TypeVar("GivenT")
ValueT = TypeVar("ValueT")


def bench(
    workload: Annotated[
        list[str] | None, typer.Option("--workload", "-w", help=f"{', '.join(PRESETS)}; may be repeated.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help='Prompts: lines of text, or *.jsonl with "prompt" or "turns".')
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N or N:M", help="Length of a random prompt.")
    ] = "128",
    output_tokens: Annotated[str, typer.Option(metavar="N or N:M", help="Length of an answer.")] = "64",
    requests: Annotated[int | None, typer.Option(min=1, help="Sessions. Default: 64, or the file's.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Requests of a session, each with all before it.")] = 1,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Tokens that sessions begin with alike.")] = 0,
    prefixes: Annotated[int, typer.Option(min=1, help="How many such beginnings there are.")] = 1,
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Closed loop: streams. Default: 16, or the preset's."),
    ] = None,
    rates: Annotated[
        str | None, typer.Option(metavar="R,R,...", help="Open loop: sessions a second, a run for each.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=0.01, help="Of an open loop: 1 is Poisson, below it comes in bursts (gamma).")
    ] = 1.0,
    slo: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MS", help="ttft, itl (99 % of gaps), tpot or e2e; gives the goodput."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions, each with prompts of its own.")] = 1,
    warm_up: Annotated[bool, typer.Option(help="Send other prompts before each run.")] = True,
    respect_eos: Annotated[
        bool, typer.Option("--respect-eos", help="Let answers end by themselves.")
    ] = False,
    openai: Annotated[
        str | None,
        typer.Option(metavar="URL", help=f"Measure an OpenAI endpoint ({API_KEY_VARIABLE} is sent)."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use its chat completions.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json of its model, for text prompts of exact length.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="Instead: its vocabulary; prompts go as token ids.")
    ] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Serve this model (`demo`) for the measurement.")
    ] = None,
    scheduler_option: Annotated[
        list[str] | None, typer.Option("--scheduler-option", "-S", metavar="NAME=VALUE", help="For --serve.")
    ] = None,
    worker_option: Annotated[
        list[str] | None, typer.Option("--worker-option", "-W", metavar="NAME=VALUE", help="For --serve.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="For --serve: worker processes.")] = 1,
    device: Annotated[Device, typer.Option(help="For --serve.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="File for every run's figures.")] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for pictures; needs matplotlib, as `make setup` installs.")
    ] = None,
    model: options.ModelName = "",
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Measure a served model: tokens/s, and TTFT, ITL, TPOT and end-to-end latency at p50, p90, p99.

    Answers are greedy and go past the model's end-of-text, so that every request gives the tokens that were
    asked for. Compare figures of one sitting only: machines are noisy.
    """
    with _failures_told():
        shape = Shape(
            requests or _DEFAULT_SESSIONS,
            _parsed(Lengths.parse, prompt_tokens),
            _parsed(Lengths.parse, output_tokens),
            turns,
            prefix_tokens,
            prefixes,
        )
        plan = Plan(
            _workloads(workload or [], prompt_file, shape, requests),
            _loads(concurrency, rates, burstiness),
            repeat,
            warm_up,
            _parsed(Objective.parse, slo) if slo else None,
        )
        endpoint = Endpoint(address, model, openai, chat, tokenizer, vocab_size, not respect_eos)
        endpoint.check(turns=turns, prompts_given=prompt_file is not None and not workload)
        if plots:
            pictures.require_matplotlib()
        stop_on_signals()
        with _served(serve, workers, device, scheduler_option, worker_option) as started:
            runs = _runs(dataclasses.replace(endpoint, address=started or address), plan)
        if runs:
            out.print(report.table(runs))
        if json_file:
            _write_json(json_file, openai or serve or address, runs, plan.num_runs)
        if plots and runs:
            for path in pictures.draw(plots, runs):
                err.print(f"drawn: {path}", markup=False)
        if len(runs) < plan.num_runs:
            what = "settings" if plan.repeat == 1 else "runs"
            err.print(f"interrupted: {len(runs)} of {plan.num_runs} {what} measured", style="yellow")
            raise typer.Exit(INTERRUPTED)


def _write_json(path: Path, target: str, runs: list[Run], num_planned: int) -> None:
    try:
        report.write_json(path, target, runs, num_planned)
    except OSError as error:
        raise unreadable("--json", path, error) from None


@contextlib.contextmanager
def _failures_told() -> Iterator[None]:
    try:
        yield
    except BenchError as error:
        code = {PlanError: BAD_REQUEST, EndpointError: UNREACHABLE}.get(type(error), SERVER_FAILED)
        raise Failure(str(error), code) from None


def _runs(endpoint: Endpoint, plan: Plan) -> list[Run]:
    """Measures until the plan is done; Ctrl-C keeps what was measured."""
    runs: list[Run] = []

    def keep(run: Run) -> None:
        runs.append(run)
        rate = run.figures.output_tokens_per_s
        err.print(f"{run.workload}, {run.title}, {run.load}: {rate:.1f} tokens/s", markup=False)

    with contextlib.suppress(KeyboardInterrupt):
        _run_loop(measure(endpoint, plan, ProgressBar(err), keep))
    return runs


def _run_loop(main: Any) -> None:
    try:
        import uvloop  # not on every platform
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


@contextlib.contextmanager
def _served(
    model: str | None,
    workers: int,
    device: Device,
    scheduler_option: list[str] | None,
    worker_option: list[str] | None,
) -> Iterator[str]:
    """Serves a model while the block runs, and gives the scheduler's address. No model: an empty address."""
    if model is None:
        yield ""
        return
    cluster_options = ClusterOptions(
        model=find_model(model),
        num_workers=workers,
        port=0,
        device=device,
        scheduler_flags=named_flags(scheduler_option),
        worker_flags=named_flags(worker_option),
    )
    with LocalCluster(cluster_options) as cluster:
        with LoadScreen() as screen:
            cluster.wait_ready(screen.show)
        yield cluster.address


def _workloads(names: list[str], prompt_file: Path | None, shape: Shape, most: int | None) -> list[Workload]:
    unknown = [name for name in names if name.lower() not in PRESETS]
    if unknown:
        raise Failure(
            f"there is no workload {', '.join(unknown)}; there are {', '.join(PRESETS)}", BAD_REQUEST
        )
    chosen = [PRESETS[name.lower()] for name in names]
    if prompt_file is not None:
        chosen.append(from_file(prompt_file, shape.output, _DEFAULT_STREAMS, most))
    return chosen or [from_shape(shape, _DEFAULT_STREAMS)]


def _loads(concurrency: str | None, rates: str | None, burstiness: float) -> list[Load]:
    loads: list[Load] = [ClosedLoop(int(n)) for n in _numbers("--concurrency", concurrency, int)]
    return loads + [OpenLoop(rate, burstiness) for rate in _numbers("--rates", rates, float)]


def _numbers(option: str, text: str | None, kind: Callable[[str], float]) -> list[float]:
    try:
        numbers = [kind(part) for part in text.split(",")] if text else []
        if any(not 0 < number < float("inf") for number in numbers):
            raise ValueError
    except ValueError:
        raise Failure(f"{option} {text} is no list of numbers above 0, such as 1,2,4", BAD_REQUEST) from None
    return numbers


def _parsed(parse: Callable[[GivenT], ValueT], given: GivenT) -> ValueT:
    try:
        return parse(given)
    except ValueError as error:
        raise Failure(str(error), BAD_REQUEST) from None
