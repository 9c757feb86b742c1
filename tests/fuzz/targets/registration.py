"""RegisterWorkerRequest: the address that the scheduler is to dial."""

from fuzz.mutations import message_maker
from fuzz.target import Target
from google.protobuf.message import DecodeError

from scheduler_service.addresses import check_address, host_of, is_loopback
from tidegate.admin.v1 import admin_pb2 as pb

SEEDS = [
    pb.RegisterWorkerRequest(address=address, worker_id="w-1")
    for address in ("127.0.0.1:50061", "[::1]:1", "worker.internal:65535", "localhost:50061")
]


def read(data: bytes) -> None:
    """An accepted address has a host and a port."""
    address = pb.RegisterWorkerRequest.FromString(data).address
    check_address(address)
    assert host_of(address) and 1 <= int(address.rpartition(":")[2]) <= 65_535
    is_loopback(host_of(address))


TARGET = Target("registration", message_maker(SEEDS), read, (DecodeError, ValueError))
