"""WorkerHello: what a worker tells of itself, up to the core's view of it."""

from fuzz.mutations import message_maker
from fuzz.target import Target
from google.protobuf.message import DecodeError

from scheduler_service.hello_codec import PROTOCOL_VERSION, decode_hello
from scheduler_service.workers import WorkerRefusedError
from tidegate.worker.v1 import worker_pb2 as pb

EPOCH = 5
SEEDS = [
    pb.ExecuteResponse(
        hello=pb.WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            scheduler_epoch=EPOCH,
            incarnation="i",
            model=pb.ModelInfo(
                name="m",
                fingerprint="f",
                max_model_len=128,
                vocab_size=500,
                eos_token_ids=[1],
                tokenizer=pb.TokenizerFiles(tokenizer_json=b"{}", special_tokens={"bos_token": "<s>"}),
            ),
            block_size=16,
            num_blocks=64,
            num_slots=8,
            max_batched_tokens=64,
            max_in_flight=2,
        )
    )
]


def read(data: bytes) -> None:
    """What was accepted is a worker that the core can count with."""
    info = decode_hello(pb.ExecuteResponse.FromString(data), EPOCH)
    spec = info.to_core("w")
    assert spec.num_blocks >= 2 and spec.num_slots >= 1 and spec.max_in_flight >= 1
    assert spec.block_size & (spec.block_size - 1) == 0
    assert info.incarnation and info.model.name


TARGET = Target("worker_hello", message_maker(SEEDS), read, (DecodeError, WorkerRefusedError))
