"""GenerateRequest: what clients send, up to the check of every field and the status that tells of it."""

from fuzz.mutations import message_maker
from fuzz.target import Target
from google.protobuf.message import DecodeError

from scheduler_service import errors
from scheduler_service.errors import ServiceError
from scheduler_service.served_model import ServedModel
from scheduler_service.validation import check_generate
from tidegate.inference.v1 import inference_pb2 as pb

MODELS = {
    name: ServedModel(
        name=name,
        fingerprint="f",
        max_model_len=128,
        vocab_size=500,
        eos_token_ids=frozenset({1}),
        tokenizer_json=tokenizer,
        chat_template=template,
        structured_output=bool(template),
    )
    for name, tokenizer, template in (("text", b"?", "?"), ("ids", b"", ""))
}
SEEDS = [
    pb.GenerateRequest(
        model="text",
        text="hello",
        request_id="a:b",
        n=2,
        priority=-1,
        tenant="t",
        cache_salt="s",
        sampling=pb.SamplingParams(temperature=0.5, top_k=5, top_p=0.5, seed=7, logit_bias={3: 1.0}),
        stopping=pb.StoppingParams(max_tokens=5, min_tokens=1, stop=["x"], stop_token_ids=[3]),
        output=pb.OutputParams(logprobs=2, text=True, token_ids=True),
    ),
    pb.GenerateRequest(model="ids", token_ids=pb.TokenIds(ids=[1, 2, 3]), output=pb.OutputParams(text=False)),
    pb.GenerateRequest(
        model="text", chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hello")])
    ),
]


def read(data: bytes) -> None:
    """An accepted one is within every limit; a refused one is told in what fits into trailing metadata."""
    request = pb.GenerateRequest.FromString(data)
    try:
        options = check_generate(request, MODELS)
        stopping = options.stopping(len(request.token_ids.ids) or 1, 32)
    except ServiceError as error:
        assert errors.to_status(error).ByteSize() <= 8192
        raise
    sampling, model = options.sampling, options.model
    assert 1 <= options.n <= 64
    assert 0 <= sampling.temperature <= 2 and 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1
    assert 0 < sampling.repetition_penalty <= 10 and 0 <= sampling.top_k < model.vocab_size
    assert all(0 <= token < model.vocab_size and -100 <= bias <= 100 for token, bias in sampling.logit_bias)
    assert 1 <= stopping.max_tokens < model.max_model_len and stopping.min_tokens <= stopping.max_tokens
    assert all(0 <= token < model.vocab_size for token in stopping.stop_token_ids)
    if options.prompt_token_ids is not None:
        assert options.prompt_token_ids.min() >= 0 and options.prompt_token_ids.max() < model.vocab_size


TARGET = Target("generate_request", message_maker(SEEDS), read, (DecodeError, ServiceError), 3)
