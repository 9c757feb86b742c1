"""An engine that does what the test says: it records what is submitted and pushes events by hand."""

import numpy as np
from sample_tokenizers import tokenizer_json

from scheduler_service.core.events import Admitted, Finished, FinishReason, Timings, Usage
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.served_model import ServedModel

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def served_model(name="tiny", kind="byte_level", **changes) -> ServedModel:
    values = {
        "fingerprint": "f",
        "max_model_len": 128,
        "vocab_size": 500,
        "eos_token_ids": frozenset({1}),
        "tokenizer_json": tokenizer_json(kind) if kind else b"",
        "chat_template": CHATML if kind else "",
        "special_tokens": {"bos_token": "<|im_start|>"},
        "ready_workers": 1,
    }
    return ServedModel(name=name, **{**values, **changes})


class FakeConfig:
    default_max_tokens = 32
    queue_timeout = 60.0


class FakeEngine:
    """Has the interface FrontendEngine. A request lives until a test, `cancel` or `stop` finishes it."""

    def __init__(self, *models: ServedModel) -> None:
        self.draining = False
        self.clock = 1000.0
        self.served = {model.name: model for model in models}
        self.specs = []
        self.live = {}  # request_id -> {index: number of tokens}
        self.cancelled = []
        self.stopped = []
        self.newcomers = []
        self.door = None  # a function of a newcomer: what it is turned away with
        self.refusal = None  # a function of the spec: what the next submits answer

    def now(self):
        return self.clock

    def models(self):
        return self.served

    def turn_away(self, newcomer):
        self.newcomers.append(newcomer)
        return None if self.door is None else self.door(newcomer)

    async def submit(self, spec):
        if self.refusal is not None:
            return self.refusal(spec)
        self.specs.append(spec)
        self.live[spec.request_id] = dict.fromkeys(range(spec.n), 0)
        return None

    async def cancel(self, request_id, tenant):
        return self._cancel(request_id)

    def abandon(self, output):
        if any(spec.sink is output for spec in self.specs):
            self._cancel(output.request_id)

    def _cancel(self, request_id):
        if request_id not in self.live:
            return False
        self.cancelled.append(request_id)
        for each in list(self.live[request_id]):
            self.finish(FinishReason.CANCELLED, index=each, request_id=request_id)
        return True

    def stop(self, output, index, num_tokens):
        request_id = output.request_id
        self.stopped.append((request_id, index, num_tokens))
        self.finish(FinishReason.STOP, index=index, request_id=request_id)

    # For tests.

    @property
    def spec(self):
        return self.specs[-1]

    def admit(self, index=0, cached_tokens=0):
        self.spec.sink.push(Admitted(self.spec.request_id, index, "worker", cached_tokens))

    def push(self, token_ids, index=0, logprobs=None):
        for i, token_id in enumerate(token_ids):
            self.live.get(self.spec.request_id, {}).setdefault(index, 0)
            if self.spec.request_id in self.live:
                self.live[self.spec.request_id][index] += 1
            self.spec.sink.push_tokens(index, token_id, None if logprobs is None else logprobs[i])

    def finish(self, reason=FinishReason.LENGTH, index=0, request_id=None, stop_token_id=None, detail=""):
        request_id = request_id or self.spec.request_id
        candidates = self.live[request_id]
        num_tokens = candidates.pop(index)
        if not candidates:
            del self.live[request_id]
        spec = next(spec for spec in self.specs if spec.request_id == request_id)
        usage = Usage(len(spec.prompt_token_ids), 3, num_tokens, 1)
        timings = Timings(0.5, 1.25, 2.0, 0.125, 1.75)
        spec.sink.push(Finished(request_id, index, reason, stop_token_id, usage, timings, detail))


def logprobs(value, top=()):
    """Values that float32 holds exactly come back as they are."""
    return TokenLogprobs(value, tuple(top))


def prompt_ids(spec):
    assert spec.prompt_token_ids.dtype == np.int32
    return spec.prompt_token_ids.tolist()
