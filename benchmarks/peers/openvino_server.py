"""A small server with OpenAI's completions in front of OpenVINO GenAI, which has none of its own in Python.

It runs in the environment of OpenVINO, where nothing of ours is installed: one thread steps the pipeline, the
event loop streams. Prompts are tokenized by the library that the model was published for.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


@dataclass(slots=True)
class Job:
    """One request. Its tokens come as lists of ids, then None."""

    prompt_ids: list[int]
    max_tokens: int
    outputs: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)
    handle: Any = None


class Engine(threading.Thread):
    """Owns the pipeline."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__(daemon=True)
        self._pipeline = pipeline
        self._arrived: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self.loop: asyncio.AbstractEventLoop | None = None

    def submit(self, job: Job) -> None:
        """Takes a request, from any thread."""
        self._arrived.put(job)

    def run(self) -> None:
        """Steps as long as there is work, and waits for it otherwise."""
        active: list[Job] = []
        while True:
            while not active or not self._arrived.empty():
                active.append(self._begin(self._arrived.get()))
            self._pipeline.step()
            for job in active:
                if job.handle.can_read():
                    outputs = list(job.handle.read().values())
                    self._tell(job, outputs[0].generated_ids)
            done = [job for job in active if self._is_done(job)]
            for job in done:
                self._tell(job, None)
            active = [job for job in active if job not in done]

    def _begin(self, job: Job) -> Job:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=job.max_tokens, ignore_eos=True, do_sample=False
        )
        ids = openvino.Tensor(np.array([job.prompt_ids], np.int64))
        job.handle = self._pipeline.add_request(next(self._numbers), ids, config)
        return job

    def _is_done(self, job: Job) -> bool:
        running = openvino_genai.GenerationStatus.RUNNING
        return bool(job.handle.get_status() != running and not job.handle.can_read())

    def _tell(self, job: Job, token_ids: list[int] | None) -> None:
        if self.loop is not None:
            self.loop.call_soon_threadsafe(job.outputs.put_nowait, token_ids)


class Server:
    """The routes."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, name: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._name = name

    async def health(self, request: Request) -> Response:
        """Answers as soon as the pipeline is there."""
        return JSONResponse({})

    async def models(self, request: Request) -> Response:
        """Names the model."""
        return JSONResponse({"data": [{"id": self._name}]})

    async def completions(self, request: Request) -> Response:
        """Streams a greedy completion of exactly max_tokens."""
        body = await request.json()
        self._engine.loop = asyncio.get_running_loop()
        job = Job(self._tokenizer.encode(body["prompt"]).ids, body["max_tokens"])
        self._engine.submit(job)
        return StreamingResponse(self._events(job), media_type="text/event-stream")

    async def _events(self, job: Job) -> AsyncIterator[str]:
        decoder = DecodeStream(skip_special_tokens=False)
        num_tokens = 0
        while (token_ids := await job.outputs.get()) is not None:
            num_tokens += len(token_ids)
            pieces = [decoder.step(self._tokenizer, token_id) or "" for token_id in token_ids]
            yield _event({"choices": [{"index": 0, "text": "".join(pieces)}]})
        usage = {"prompt_tokens": len(job.prompt_ids), "completion_tokens": num_tokens}
        yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _pipeline(options: argparse.Namespace) -> Any:
    config = openvino_genai.SchedulerConfig()
    config.cache_size = options.kv_gib
    config.max_num_seqs = options.seats
    config.max_num_batched_tokens = 2048
    config.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": options.threads, "INFERENCE_PRECISION_HINT": "bf16"}
    return openvino_genai.ContinuousBatchingPipeline(str(options.model), config, "CPU", properties)


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seats", type=int, required=True)
    parser.add_argument("--kv-gib", type=int, required=True)
    options = parser.parse_args()
    engine = Engine(_pipeline(options))
    engine.start()
    server = Server(engine, Tokenizer.from_file(str(options.model / "tokenizer.json")), options.model.name)
    routes = [
        Route("/health", server.health),
        Route("/v1/models", server.models),
        Route("/v1/completions", server.completions, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
