"""An OpenAI endpoint without a model: streams as many words as asked for, and records what it was sent."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeOpenAI:
    """Serves on a free port of 127.0.0.1 until stop()."""

    def __init__(self) -> None:
        self.models = ["fake"]
        self.refusals = 0  # so many of the next requests get 429
        self.breaks = False  # whether streams end with an error in-band
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.authorizations: list[str | None] = []
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(200, {"data": [{"id": name} for name in fake.models]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake._lock:
                    fake.bodies.append(body)
                    fake.paths.append(self.path)
                    fake.authorizations.append(self.headers["Authorization"])
                    refused = fake.refusals > 0
                    fake.refusals -= refused
                if refused:
                    self._reply(429, {"error": {"message": "later"}})
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for event in fake._events(body):
                    self.wfile.write(f"data: {event}\n\n".encode())

            def _reply(self, code: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def _events(self, body: dict[str, Any]) -> list[str]:
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        for i in range(body["max_tokens"]):
            text = f" w{i}"
            events.append(
                {"choices": [{"delta": {"content": text}} if "messages" in body else {"text": text}]}
            )
        if self.breaks:
            return [json.dumps(event) for event in [*events[:2], {"error": {"message": "gone"}}]]
        usage = {"prompt_tokens": 9, "completion_tokens": body["max_tokens"]}
        usage["prompt_tokens_details"] = {"cached_tokens": 4}
        return [*map(json.dumps, events), json.dumps({"choices": [], "usage": usage}), "[DONE]"]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
