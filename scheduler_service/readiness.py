"""Owns when a process says that it takes requests: once it has a worker, and the texts of its models.

Reading a tokenizer takes up to seconds. It is done before the first request, which would wait for it. No
gRPC here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from scheduler_service.logs import EventLog
from scheduler_service.model_text import ModelTexts
from scheduler_service.served_model import ServedModel

_log = EventLog("readiness")


class Readiness:
    """Follows whether the engine takes requests, and tells `say` once the process does, too."""

    def __init__(self, texts: ModelTexts | None, say: Callable[[bool], None]) -> None:
        """Without `texts`, nothing is read: the process has no frontend."""
        self.ready = False
        """What was said last."""
        self._texts = texts
        self._say = say
        self._wanted = False
        self._reading: set[asyncio.Task[None]] = set()

    def note(self, ready: bool, models: Mapping[str, ServedModel]) -> None:
        """Whether the engine takes requests, and its models, have changed. One that comes while others are
        served is read meanwhile."""
        self._wanted = ready
        if not ready:
            self._change(False)
        elif self._texts is None:
            self._change(True)
        else:
            served = [model for model in models.values() if model.ready_workers and model.tokenizer_json]
            self._read(self._texts, served)

    def _read(self, texts: ModelTexts, models: list[ServedModel]) -> None:
        if self.ready and all(texts.has(model) for model in models):
            return
        task = asyncio.create_task(self._prepare(texts, models))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _prepare(self, texts: ModelTexts, models: list[ServedModel]) -> None:
        results = await asyncio.gather(*map(texts.get, models), return_exceptions=True)
        for model, result in zip(models, results, strict=True):
            if isinstance(result, Exception):  # token ids can still be sent
                _log.error("tokenizer_unreadable", model=model.name, reason=str(result))
        if self._wanted:
            self._change(True)

    def _change(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            _log.info("readiness_changed", ready=ready)
            self._say(ready)
