"""Owns a frontend's process: it serves clients on the public port, for the engine of another process.

That process starts it with one end of a socket pair as an inherited descriptor, whose number is the only
argument, and ends it by closing the other end. So it also ends when that process dies.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

from scheduler_service import logs
from scheduler_service.call_counts import CallCounts
from scheduler_service.calls_api import Calls
from scheduler_service.config import ServiceConfig
from scheduler_service.event_loop import run_loop
from scheduler_service.logs import EventLog
from scheduler_service.model_text import ModelTexts
from scheduler_service.port_api import INFERENCE, Health, public_port
from scheduler_service.readiness import Readiness
from scheduler_service.remote_engine import RemoteEngine
from scheduler_service.security_api import Security
from scheduler_service.telemetry import Telemetry, rpc_traceparent

_GRACE_S = 1.0
_COUNTS_EVERY_S = 1.0

_log = EventLog("frontend_process")


def main() -> int:
    """Runs a frontend. Returns the exit status."""
    # They are for the process that started this one, and that ends it when its clients have been served.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        run_loop(_serve(socket.socket(fileno=int(sys.argv[1]))))
    except OSError as error:
        _log.error("frontend_cannot_start", reason=str(error))
        return 1
    except asyncio.CancelledError:  # the engine's process has ended before it said a word
        return 1
    return 0


async def _serve(end: socket.socket) -> None:
    engine = RemoteEngine(rpc_traceparent)
    await engine.open(end)
    config = ServiceConfig.model_validate_json(await engine.setup)
    logs.setup(config.log_level, config.log_format)
    engine.limits = config.to_core()
    telemetry = Telemetry.from_environment(metrics=False)
    calls = Calls(INFERENCE, telemetry)
    health = Health()
    texts = ModelTexts()
    port = public_port(engine, config, health, Security(config).public_port(), calls, texts)
    port.listen(config.host, config.port, [INFERENCE])
    await health.set("", True)
    await health.set(INFERENCE, False)
    readiness = Readiness(texts, lambda ready: health.set_soon(INFERENCE, ready))
    engine.on_status = lambda: readiness.note(engine.ready, engine.models())
    engine.on_status()
    await port.server.start()
    engine.say_listening()
    counting = asyncio.create_task(_tell_counts(engine, calls.counts))
    served = asyncio.create_task(_until_served(engine, calls))
    lost = asyncio.create_task(engine.lost.wait())
    await asyncio.wait([served, lost], return_when=asyncio.FIRST_COMPLETED)
    served.cancel()
    await port.server.stop(_GRACE_S)
    counting.cancel()
    engine.say_counts(calls.counts)
    await asyncio.sleep(0)  # they are sent
    engine.close()
    await asyncio.to_thread(telemetry.shutdown)


async def _tell_counts(engine: RemoteEngine, counts: CallCounts) -> None:
    """Tells the engine's process, which has the metrics of all, what is counted here."""
    while True:
        await asyncio.sleep(_COUNTS_EVERY_S)
        engine.say_counts(counts)


async def _until_served(engine: RemoteEngine, calls: Calls) -> None:
    """Returns once this process may end since nobody needs it any more."""
    await engine.finishing.wait()
    await calls.idle.wait()


if __name__ == "__main__":
    sys.exit(main())
