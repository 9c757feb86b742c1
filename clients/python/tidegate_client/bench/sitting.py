"""One sitting: every workload under every load, as often as asked, one run after the other.

Owns their order: repetitions outermost, so that a machine's moods fall on all alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidegate_client.bench.endpoint import Endpoint
from tidegate_client.bench.figures import Objective
from tidegate_client.bench.load import ClosedLoop, Load
from tidegate_client.bench.progress import ProgressBar
from tidegate_client.bench.run import Run, run
from tidegate_client.bench.workload import Workload


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how often."""

    workloads: list[Workload]
    loads: list[Load]
    """Empty: a closed loop with each workload's own number of streams."""
    repeat: int = 1
    warm_up: bool = True
    objective: Objective | None = None

    @property
    def num_runs(self) -> int:
        """How many runs it has: each workload under each load, as often as asked."""
        return self.repeat * len(self.workloads) * max(1, len(self.loads))


async def measure(endpoint: Endpoint, plan: Plan, bar: ProgressBar, on_run: Callable[[Run], None]) -> None:
    """Runs the plan and hands out each run as it ends. Raises BenchError, TidegateError."""
    async with endpoint.opened() as (target, maker):
        with bar:
            for seed in range(plan.repeat):
                for workload in plan.workloads:
                    for load in plan.loads or [ClosedLoop(workload.concurrency)]:
                        bar.begin(f"{workload.name}, {load}")
                        done = await run(
                            target,
                            workload,
                            load,
                            seed,
                            maker,
                            warm_up=plan.warm_up and endpoint.makes_prompts(),
                            objective=plan.objective,
                            on_start=bar.start,
                            on_passage=bar.advance,
                        )
                        on_run(done)
