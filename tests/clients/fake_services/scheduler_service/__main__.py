"""A scheduler service that knows the fake workers, to test how services are started and stopped."""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from fake_process import flag, refuse_options, run_until_terminated, started_workers  # noqa: E402
from fake_server import FakeInference  # noqa: E402

from tidegate.inference.v1 import inference_pb2  # noqa: E402


class FakeScheduler(FakeInference):
    def ListModels(self, request, context):
        model = inference_pb2.Model(name="a", ready_workers=started_workers())
        return inference_pb2.ListModelsResponse(models=[model] if model.ready_workers else [])


refuse_options("scheduler")
server = FakeScheduler()
port = int(server.address.rpartition(":")[2])
admin_port = 7 if "--admin-port=0" in sys.argv else port  # nobody listens there: its workers are fakes
ready = {"port": port, "admin_host": "127.0.0.1", "admin_port": admin_port}
Path(flag("ready-file")).write_text(json.dumps(ready))
run_until_terminated("scheduler")
