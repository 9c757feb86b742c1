"""Owns the wire form of hellos: the scheduler's, and the checks on the worker's."""

from __future__ import annotations

from scheduler_service.served_model import ServedModel
from scheduler_service.workers import WorkerInfo, WorkerRefusedError
from tidegate.worker.v1 import worker_pb2 as pb

PROTOCOL_VERSION = 1
_MAX_COUNT = 2**31 - 1  # ids travel as int32


def encode_hello(worker_id: str, epoch: int) -> pb.ExecuteRequest:
    """The first message of a stream. Any model is welcome here; the registry judges its fingerprint."""
    return pb.ExecuteRequest(
        hello=pb.SchedulerHello(
            protocol_version=PROTOCOL_VERSION,
            scheduler_epoch=epoch,
            worker_id=worker_id,
            model_fingerprint="",
        )
    )


def decode_hello(message: pb.ExecuteResponse, epoch: int) -> WorkerInfo:
    """What the worker is and has. Raises WorkerRefusedError."""
    if message.WhichOneof("message") != "hello":
        raise WorkerRefusedError("its first message is not a hello")
    hello = message.hello
    if hello.protocol_version != PROTOCOL_VERSION:
        raise WorkerRefusedError(
            f"it speaks protocol version {hello.protocol_version}, this service {PROTOCOL_VERSION}; "
            "run the same release on both sides"
        )
    if hello.scheduler_epoch != epoch:
        raise WorkerRefusedError(f"it answers epoch {hello.scheduler_epoch}, this stream has {epoch}")
    _check_counts(hello)
    return WorkerInfo(
        incarnation=hello.incarnation,
        model=_decode_model(hello.model),
        block_size=hello.block_size,
        num_blocks=hello.num_blocks,
        num_slots=hello.num_slots,
        max_batched_tokens=hello.max_batched_tokens,
        max_in_flight=hello.max_in_flight,
        num_host_blocks=hello.num_host_blocks,
        block_copy_ms=hello.block_copy_ns / 1e6,
    )


def _check_counts(hello: pb.WorkerHello) -> None:
    minima = {
        "model.max_model_len": (hello.model.max_model_len, 2),
        "model.vocab_size": (hello.model.vocab_size, 1),
        "block_size": (hello.block_size, 1),
        "num_blocks": (hello.num_blocks, 2),
        "num_slots": (hello.num_slots, 1),
        "max_batched_tokens": (hello.max_batched_tokens, 1),
        "max_in_flight": (hello.max_in_flight, 1),
        "num_host_blocks": (hello.num_host_blocks, 0),
    }
    for name, (value, minimum) in minima.items():
        if not minimum <= value <= _MAX_COUNT:
            raise WorkerRefusedError(f"its hello has {name} = {value}; allowed is {minimum} to {_MAX_COUNT}")
    if not hello.incarnation or not hello.model.name:
        raise WorkerRefusedError("its hello lacks an incarnation or a model name")


def _decode_model(model: pb.ModelInfo) -> ServedModel:
    return ServedModel(
        name=model.name,
        fingerprint=model.fingerprint,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        tokenizer_json=model.tokenizer.tokenizer_json,
        chat_template=model.tokenizer.chat_template,
        special_tokens=dict(model.tokenizer.special_tokens),
        structured_output=model.structured_output,
    )
