"""AttachRequest: what a client says that it has, and the cut of what it gets."""

from fuzz.mutations import message_maker
from fuzz.target import Target
from google.protobuf.message import DecodeError

from scheduler_service.candidate_output import Delta
from scheduler_service.errors import ServiceError
from scheduler_service.seam import check_attach
from tidegate.inference.v1 import inference_pb2 as pb

TEXTS = ("né", "", "\U0001f600 and more")
SEEDS = [
    pb.AttachRequest(
        request_id="r",
        received=[
            pb.Received(index=0, num_tokens=3, text_bytes=4),
            pb.Received(index=1, num_tokens=1, text_bytes=1, finished=True),
        ],
    )
]


def read(data: bytes) -> None:
    """What a client gets is the end of what there is, whatever it says that it has."""
    request = pb.AttachRequest.FromString(data)
    seam = check_attach(request)
    tokens: list[int] = []
    for number, text in enumerate(TEXTS):
        delta = Delta(0, text, (2 * number, 2 * number + 1), ())
        cut = seam.cut(delta)
        if isinstance(cut, Delta):
            tokens += cut.token_ids
    assert tokens == list(range(6))[6 - len(tokens) :]


TARGET = Target("attach_request", message_maker(SEEDS), read, (DecodeError, ServiceError))
