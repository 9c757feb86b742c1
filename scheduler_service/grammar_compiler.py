"""Owns whether output forms can be compiled, and their grammars: asked of a process and remembered.

Nothing of this runs on the event loop, and no form can hold up requests that have none. No gRPC here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from scheduler_service.errors import Reason, ServiceError, Violation, invalid_request
from scheduler_service.grammar_process import MAX_COMPUTING_S, FormError, read_frame, write_frame
from scheduler_service.logs import EventLog
from scheduler_service.output_form import OutputForm
from scheduler_service.served_model import ServedModel

_log = EventLog("grammars")

MAX_REMEMBERED = 256
MAX_WAITING = 64
_ANSWER_TIMEOUT_S = 20.0  # of a process that gets little of the machine
_RETRY_S = 1.0


class GrammarCompiler:
    """Compiles forms, one at a time. Each is compiled once, for as long as it is remembered."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammar-compiler")
        self._process = _Process()
        self._known: OrderedDict[tuple[str, str, str], Future[str]] = OrderedDict()
        self._num_waiting = 0

    async def compile(self, model: ServedModel, special_tokens: Mapping[str, int], form: OutputForm) -> str:
        """The grammar that workers of the model take. Raises ServiceError for a form that is none."""
        key = (model.fingerprint, form.kind, form.text)
        known = self._known.get(key)
        if known is None:
            known = self._begin(key, model, special_tokens, form)
        else:
            self._known.move_to_end(key)
        try:
            # Shielded: others may wait for the same one, whatever becomes of this caller.
            return await asyncio.shield(asyncio.wrap_future(known))
        except FormError as error:
            raise invalid_request([Violation(form.field, str(error))], Reason.INVALID_GRAMMAR) from None
        except (TimeoutError, OSError) as error:  # which says nothing of the form
            if self._known.get(key) is known:
                del self._known[key]
            raise _busy(f"a form of outputs was not compiled in {_ANSWER_TIMEOUT_S:g} s") from error

    def _begin(
        self,
        key: tuple[str, str, str],
        model: ServedModel,
        special_tokens: Mapping[str, int],
        form: OutputForm,
    ) -> Future[str]:
        if self._num_waiting >= MAX_WAITING:
            raise _busy(f"{self._num_waiting} forms of outputs wait to be compiled")
        vocabulary = json.dumps([model.vocab_size, dict(special_tokens), sorted(model.eos_token_ids)])
        future = self._thread.submit(self._process.compile, form.kind, form.text, vocabulary)
        self._num_waiting += 1
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _call_soon(loop, self._note_done))
        self._known[key] = future
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return future

    def _note_done(self) -> None:
        self._num_waiting -= 1


class _Process:
    """The process, started when there is something to do. For one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, kind: str, text: str, vocabulary: str) -> str:
        """See grammar_process.compile_form. Raises FormError; TimeoutError or OSError where all is slow."""
        process = self._process or self._start()
        answer, ready = None, True
        assert process.stdin is not None and process.stdout is not None  # noqa: S101 - pipes, as started
        with contextlib.suppress(OSError):
            write_frame(process.stdin, [kind, text, vocabulary])
            ready = bool(select.select([process.stdout], [], [], _ANSWER_TIMEOUT_S)[0])
            answer = read_frame(process.stdout) if ready else None
        if answer is None:
            self._process = None
            if ready:  # its pipe is closed, so it is ending
                process.wait()
            _end(process)
            _log.warning("grammar_process_ended", returncode=process.returncode)
            if not ready:
                raise TimeoutError
            limit = f"{MAX_COMPUTING_S * 1000:g} ms of computing"
            raise FormError(f"it takes more than {limit} to compile, or too much memory; make it smaller")
        grammar, message = answer
        if message:
            raise FormError(message)
        return str(grammar)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "scheduler_service.grammar_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a form's text is nothing for logs
        )
        weakref.finalize(self, _end, process)
        self._process = process
        return process


def _busy(what: str) -> ServiceError:
    return ServiceError(Reason.QUEUE_FULL, f"{what}; try again later", retry_after_s=_RETRY_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _call_soon(loop: asyncio.AbstractEventLoop, callback: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the service has ended
        loop.call_soon_threadsafe(callback)  # type: ignore[arg-type]
