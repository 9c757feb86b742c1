"""A worker service that only tells its status, or fails, to test how services are started and stopped."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from tidegate.worker.v1 import worker_pb2, worker_pb2_grpc

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_process import flag, refuse_options, run_until_terminated


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    def GetStatus(self, request, context):
        return worker_pb2.GetStatusResponse(
            phase=worker_pb2.WORKER_PHASE_LOADING, progress=0.5, detail="loading weights 1 of 2 MB"
        )


if "FAKE_WORKER_FAILS" in os.environ:
    sys.exit("cannot load the model: there is no such folder")

refuse_options("worker")
server = grpc.server(ThreadPoolExecutor(max_workers=1))
worker_pb2_grpc.add_WorkerServiceServicer_to_server(FakeWorker(), server)
server.add_insecure_port(f"127.0.0.1:{flag('port')}")
server.start()
run_until_terminated("worker")
