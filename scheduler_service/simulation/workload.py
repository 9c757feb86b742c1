"""Owns what arrives in a simulation: when, how long, and from whom. Draws everything from one seed."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scheduler_service.core.request import RequestSpec
from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.worker import WorkerSpec
from scheduler_service.simulation.load import MODEL, Happening
from scheduler_service.simulation.modelled_worker import END, ModelledWorker, StepTime

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_DIGITS = 1 << 15  # so many token ids tell prompts apart
_STOPS = frozenset({END})
_SAMPLING = SamplingParams()


class WorkloadError(ValueError):
    """A workload is described in a way that makes no sense. The text says what is allowed."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens, at least 1 and at most `longest`."""

    shape: str  # "fixed", "uniform", "exponential" or "lognormal"
    values: tuple[float, ...]  # the length; both ends; the mean; the mean and sigma of the logarithm
    longest: int

    @classmethod
    def parse(cls, text: str, longest: int) -> Lengths:
        """Reads "fixed:100", "uniform:10:500", "exponential:200" or "lognormal:200:0.8".

        Raises:
            WorkloadError: it is none of these.
        """
        shape, *parts = text.split(":")
        try:
            values = tuple(float(part) for part in parts)
        except ValueError:
            values = ()
        if _NUM_VALUES.get(shape) != len(values) or min(values, default=0) <= 0:
            raise WorkloadError(
                f"lengths are {text!r}; allowed: fixed:N, uniform:LOW:HIGH, exponential:MEAN, "
                "lognormal:MEAN:SIGMA"
            )
        return cls(shape, values, longest)

    def draw(self, count: int, random: np.random.Generator) -> Ints:
        """So many lengths."""
        first, second = self.values[0], self.values[-1]
        if self.shape == "fixed":
            drawn = np.full(count, first)
        elif self.shape == "uniform":
            drawn = random.uniform(first, second + 1, count)
        elif self.shape == "exponential":
            drawn = random.exponential(first, count)
        else:
            drawn = random.lognormal(np.log(first) - second**2 / 2, second, count)
        return np.clip(drawn.astype(np.int64), 1, self.longest)


_NUM_VALUES = {"fixed": 1, "uniform": 2, "exponential": 1, "lognormal": 2}


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by arrival, as columns. `prefixes[i]` names the group whose prompts begin alike."""

    arrivals: Floats  # [requests], seconds, ascending
    prompts: Ints  # [requests], tokens
    outputs: Ints  # [requests], tokens that the model gives before it stops
    tenants: list[str]
    prefixes: Ints  # [requests]
    shared_tokens: int  # that the prompts of a group have in common, at most
    seed: int

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def happenings(self) -> tuple[Happening, ...]:
        """Nothing but requests comes."""
        return ()

    def request(self, index: int, max_tokens: int) -> RequestSpec:
        """The request that comes at that place. `max_tokens`: what it asks for, if its output is shorter."""
        longest = max(max_tokens, int(self.outputs[index]))
        return RequestSpec(
            request_id=str(index),
            model=MODEL,
            prompt_token_ids=self.prompt(index),
            sampling=_SAMPLING,
            stopping=StoppingParams(longest, eos_token_ids=_STOPS),
            tenant=self.tenants[index],
        )

    def worker(self, spec: WorkerSpec, step_time: StepTime) -> ModelledWorker:
        """A worker whose outputs have the lengths of this load."""
        return ModelledWorker(spec, step_time, self.outputs)

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Token ids of a prompt. The same index gives the same ids, and others begin otherwise, but for the
        prefix of the group."""
        length = int(self.prompts[index])
        shared = min(self.shared_tokens, length - 1)
        prompt = np.arange(length, dtype=np.int32)
        for start, end, number in ((0, shared, int(self.prefixes[index])), (shared, length, index)):
            place = prompt[start:end][:2]
            place[:] = (number % _DIGITS, number // _DIGITS)[: len(place)]
        return prompt


def draw_arrivals(count: int, rate: float, burstiness: float, random: np.random.Generator) -> Floats:
    """Arrival times at `rate` requests a second. The gaps are gamma distributed with `burstiness` as their
    coefficient of variation: 1 is a Poisson process, more comes in bursts, 0 is evenly spaced.

    Raises:
        WorkloadError: the rate is not positive or the burstiness is negative.
    """
    if rate <= 0 or burstiness < 0:
        raise WorkloadError(
            f"rate is {rate}, burstiness is {burstiness}; allowed: a rate above 0, a burstiness of at least 0"
        )
    if burstiness == 0:
        return np.arange(1, count + 1) / rate
    shape = burstiness**-2
    return np.cumsum(random.gamma(shape, 1 / (shape * rate), count))


def draw_tenants(text: str, count: int, random: np.random.Generator) -> list[str]:
    """A tenant for each request, by shares such as "a=10,b=1".

    Raises:
        WorkloadError: a share is missing or not positive.
    """
    try:
        shares = {name: float(share) for name, share in (part.split("=") for part in text.split(","))}
    except ValueError:
        shares = {}
    if not shares or min(shares.values()) <= 0:
        raise WorkloadError(f"tenants are {text!r}; allowed: NAME=SHARE,NAME=SHARE with shares above 0")
    weights = np.array(list(shares.values()))
    names = list(shares)
    return [names[i] for i in random.choice(len(names), count, p=weights / weights.sum())]


def read_trace(path: Path, longest: int, seed: int) -> Workload:
    """Reads a CSV file with the columns arrival_s, prompt_tokens, output_tokens and, if you like, tenant.

    Raises:
        WorkloadError: naming the line that cannot be read.
    """
    rows: list[tuple[float, int, int, str]] = []
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise WorkloadError(f"--trace {path}: {why}") from None
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), start=2):
        try:
            times = (float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
        except (KeyError, TypeError, ValueError):
            raise WorkloadError(
                f"{path}, line {number}: expected the columns arrival_s, prompt_tokens, output_tokens"
            ) from None
        if times[0] < 0 or not 1 <= times[1] <= longest or not 1 <= times[2] <= longest:
            raise WorkloadError(f"{path}, line {number}: lengths are 1 to {longest} tokens, times from 0")
        rows.append((*times, row.get("tenant") or "default"))
    if not rows:
        raise WorkloadError(f"{path} has no requests")
    rows.sort(key=lambda row: row[0])
    arrivals, prompts, outputs, tenants = zip(*rows, strict=True)
    count = len(rows)
    return Workload(
        np.array(arrivals), np.array(prompts), np.array(outputs), list(tenants), np.arange(count), 0, seed
    )
