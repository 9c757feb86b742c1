"""`tidegate serve`: a scheduler and its workers on this machine, until Ctrl-C."""

from __future__ import annotations

import shlex
import signal
from typing import Annotated, Literal

import typer

from tidegate_client.channel import DEFAULT_ADDRESS
from tidegate_client.cli.demo_model import DEMO, find_model
from tidegate_client.cli.failures import BAD_REQUEST, Failure
from tidegate_client.cli.load_screen import LoadScreen
from tidegate_client.cli.local_cluster import ClusterOptions, LocalCluster
from tidegate_client.cli.own_command import own_command
from tidegate_client.cli.screen import err, out
from tidegate_client.cli.service_process import ServiceProcess

# What the scheduler's presets need of a worker: most tokens in a step, most requests at a time.
PRESET_WORKER_LIMITS = {"concurrency": (16384, 256), "long-context": (4096, 64)}

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Preset = Literal["concurrency", "long-context"]

_GENERATE = "tidegate.inference.v1.InferenceService/Generate"


def serve(
    model: Annotated[str, typer.Argument(help=f"Folder, GGUF file, hub id, or {DEMO}.", show_default=False)],
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    device: Annotated[Device, typer.Option(help="Several workers take a GPU each.")] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 50051,
    frontends: Annotated[
        int, typer.Option(min=0, max=128, help="Processes that serve clients; 0: the scheduler's own.")
    ] = 0,
    console_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of a page that shows the live state.")
    ] = None,
    preset: Annotated[Preset | None, typer.Option(help="Limits from practice; explicit ones win.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of weights and KV.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV memory of a CPU worker, such as 2GiB.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a KV block.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Most tokens of a request.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Most requests on a worker.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens in a step.")] = None,
    scheduler_option: Annotated[
        list[str] | None, typer.Option("--scheduler-option", "-S", metavar="NAME=VALUE", help="Repeatable.")
    ] = None,
    worker_option: Annotated[
        list[str] | None, typer.Option("--worker-option", "-W", metavar="NAME=VALUE", help="Repeatable.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the services' logs.")] = False,
) -> None:
    """Serve a model on this machine: one scheduler and its workers, until Ctrl-C.

    What has no option here goes to a service by its own name: -S for the scheduler, -W for the workers,
    such as -S watermark=0.05 -W threads=4. The names are those of `python -m scheduler_service --help`
    and `python -m worker_service --help`. TIDEGATE_* variables reach both, TIDEGATE_WORKER_* the workers.
    """
    both = _flags(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
    worker_only = _flags(dtype=dtype, kv_memory=kv_memory, block_size=block_size, max_model_len=max_model_len)
    cluster_options = ClusterOptions(
        model=find_model(model),
        num_workers=workers,
        host=host,
        port=port,
        frontends=frontends,
        device=device,
        scheduler_flags=[
            *_flags(preset=preset, console_port=console_port),
            *both,
            *named_flags(scheduler_option),
        ],
        worker_flags=[*_preset_limits(preset), *both, *worker_only, *named_flags(worker_option)],
        verbose=verbose,
    )
    stop_on_signals()
    try:
        with LocalCluster(cluster_options) as cluster:
            with LoadScreen(enabled=not verbose) as screen:
                cluster.wait_ready(screen.show)
            _print_ready(cluster, console_port)
            _serve_until_interrupted(cluster)
    except KeyboardInterrupt:
        raise typer.Exit from None


def stop_on_signals() -> None:
    """Makes a polite kill, and the end of the terminal, the same as Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def _serve_until_interrupted(cluster: LocalCluster) -> None:
    try:
        cluster.wait(on_lost_worker=_tell_of_lost_worker)
    except KeyboardInterrupt:
        # What is printed must not keep the services from being stopped: the terminal may be gone.
        try:
            err.print("Draining: running requests finish first. Ctrl-C again ends them.")
        except OSError:
            return


def _tell_of_lost_worker(worker: ServiceProcess) -> None:
    err.print(
        f"{worker.name} ended with status {worker.process.returncode}; its requests move to the others",
        style="yellow",
    )


def _print_ready(cluster: LocalCluster, console_port: int | None) -> None:
    address = cluster.address
    flag = "" if address in (DEFAULT_ADDRESS, "127.0.0.1:50051") else f" --address {address}"
    body = '{"text": "Once upon a time", "stopping": {"max_tokens": 32}}'
    out.print(f"[bold]{cluster.model_name}[/] is served at [bold]{address}[/]. Ctrl-C drains and stops.")
    command = own_command()
    lines = [
        f'{command} generate "Once upon a time" --max-tokens 32{flag}',
        f"{command} chat{flag}",
        f"grpcurl -plaintext -d {shlex.quote(body)} {address} {_GENERATE}",
    ]
    for line in lines:
        out.print(f"  {line}", markup=False, soft_wrap=True)
    if console_port is not None:
        scheme = "https" if any("tls-cert" in flag for flag in cluster.options.scheduler_flags) else "http"
        out.print(f"The console is at [bold]{scheme}://127.0.0.1:{console_port}/[/]", highlight=False)
    if not cluster.options.verbose:
        out.print(f"Logs: {cluster.log_folder}", style="dim")


def _preset_limits(preset: Preset | None) -> list[str]:
    if preset is None:
        return []
    tokens, requests = PRESET_WORKER_LIMITS[preset]
    return _flags(max_num_batched_tokens=tokens, max_num_seqs=requests)


def _flags(**values: object) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


def named_flags(options: list[str] | None) -> list[str]:
    """Turns NAME=VALUE into flags; true and false become --name and --no-name. Raises Failure."""
    flags = []
    for option in options or []:
        name, equals, value = option.partition("=")
        name = name.lstrip("-").replace("_", "-")
        if not equals or not name:
            raise Failure(f"{option!r} is not NAME=VALUE, such as watermark=0.05", BAD_REQUEST)
        match value.lower():
            case "true":
                flags.append(f"--{name}")
            case "false":
                flags.append(f"--no-{name}")
            case _:
                flags.append(f"--{name}={value}")
    return flags
