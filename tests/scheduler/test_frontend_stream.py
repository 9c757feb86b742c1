"""A request's way through the frontend: what is submitted, and what its reader gets, in which order."""

import asyncio

import pytest
from fake_engine import FakeConfig, FakeEngine, logprobs, prompt_ids, served_model
from google.protobuf.duration_pb2 import Duration
from sample_tokenizers import library_tokenizer

from scheduler_service.candidate_output import MAX_DELTA_TOKENS, Delta, Finished
from scheduler_service.core.events import FinishReason
from scheduler_service.errors import Reason, ServiceError
from scheduler_service.frontend import Frontend
from scheduler_service.generation_stream import Admitted
from tidegate.inference.v1 import inference_pb2 as pb

TEXT = "The quick brown fox\njumps: 你好 😀."


@pytest.fixture
def library():
    return library_tokenizer("byte_level")


@pytest.fixture
def engine():
    return FakeEngine(served_model())


@pytest.fixture
def frontend(engine):
    return Frontend(engine, FakeConfig())


async def generate(frontend, timeout_s=None, **fields):
    if not {"text", "token_ids", "chat"} & set(fields):
        fields["text"] = "Hi"
    return await frontend.generate(pb.GenerateRequest(**fields), timeout_s)


async def drain(generation):
    events = []
    while (event := await asyncio.wait_for(generation.stream.next_event(), 5)) is not None:
        events.append(event)
    return events


def text_of(events, index=0):
    return "".join(event.text for event in events if isinstance(event, Delta) and event.index == index)


def ids_of(events, index=0):
    return [
        i for event in events if isinstance(event, Delta) and event.index == index for i in event.token_ids
    ]


def ends_of(events):
    return {event.index: event for event in events if isinstance(event, Finished)}


class TestWayIn:
    async def test_defaults_are_resolved(self, engine, frontend, library):
        await generate(frontend, text="Hi there")
        spec = engine.spec
        assert prompt_ids(spec) == library.encode("Hi there").ids
        assert (spec.model, spec.n, spec.priority, spec.tenant, spec.cache_salt) == (
            "tiny",
            1,
            0,
            "default",
            "",
        )
        assert (spec.deadline, spec.queue_timeout_s) == (None, 60.0)
        assert spec.stopping.max_tokens == 32
        assert spec.stopping.eos_token_ids == frozenset({1})
        sampling = spec.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1, 0, 1, 0)
        assert sampling.logprobs is None
        assert len(spec.request_id) == 32

    async def test_every_field_reaches_the_core(self, engine, frontend):
        sampling = pb.SamplingParams(
            temperature=0.5,
            top_k=40,
            top_p=0.75,
            min_p=0.25,
            presence_penalty=-1,
            frequency_penalty=2,
            repetition_penalty=1.5,
            seed=2**64 - 1,
            logit_bias={7: -100, 3: 1.5},
        )
        stopping = pb.StoppingParams(max_tokens=9, min_tokens=4, stop_token_ids=[5, 6], ignore_eos=True)
        await generate(
            frontend,
            timeout_s=2.5,
            request_id="a.B:c_1-",
            token_ids=pb.TokenIds(ids=[4, 499]),
            sampling=sampling,
            stopping=stopping,
            output=pb.OutputParams(logprobs=0),
            n=3,
            priority=-7,
            queue_timeout=Duration(seconds=1, nanos=500_000_000),
            tenant="t",
            cache_salt="s",
        )
        spec = engine.spec
        got = spec.sampling
        assert (got.temperature, got.top_k, got.top_p, got.min_p) == (0.5, 40, 0.75, 0.25)
        assert (got.presence_penalty, got.frequency_penalty, got.repetition_penalty) == (-1, 2, 1.5)
        assert (got.seed, got.logit_bias, got.logprobs) == (2**64 - 1, ((3, 1.5), (7, -100.0)), 0)
        assert (spec.stopping.max_tokens, spec.stopping.min_tokens) == (9, 4)
        assert (spec.stopping.eos_token_ids, spec.stopping.stop_token_ids) == (frozenset(), frozenset({5, 6}))
        assert (spec.request_id, spec.n, spec.priority, spec.tenant, spec.cache_salt) == (
            "a.B:c_1-",
            3,
            -7,
            "t",
            "s",
        )
        assert (spec.deadline, spec.queue_timeout_s) == (1002.5, 1.5)
        assert prompt_ids(spec) == [4, 499]

    async def test_unset_seeds_differ(self, engine, frontend):
        for _ in range(3):
            await generate(frontend)
        assert len({spec.sampling.seed for spec in engine.specs}) == 3

    async def test_the_default_of_max_tokens_ends_at_the_model_s_context(self, engine, frontend):
        await generate(frontend, token_ids=pb.TokenIds(ids=[5] * 120))
        assert engine.spec.stopping.max_tokens == 8

    async def test_a_chat_is_rendered_and_its_special_tokens_are_not_added_twice(
        self, engine, frontend, library
    ):
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hi")])
        await generate(frontend, chat=chat)
        rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert prompt_ids(engine.spec) == library.encode(rendered).ids
        chat.add_generation_prompt = False
        await generate(frontend, chat=chat)
        assert prompt_ids(engine.spec) == library.encode("<|im_start|>user\nHi<|im_end|>\n").ids

    async def test_a_model_without_tokenizer_takes_ids_and_sends_no_text(self):
        engine = FakeEngine(served_model(kind=None))
        generation = await generate(Frontend(engine, FakeConfig()), token_ids=pb.TokenIds(ids=[1, 2]))
        engine.push([4, 5])
        engine.finish()
        events = await drain(generation)
        assert (text_of(events), ids_of(events)) == ("", [4, 5])

    async def test_a_model_that_comes_back_with_another_tokenizer_is_tokenized_by_it(self, engine, frontend):
        await generate(frontend, text="The quick")
        first = prompt_ids(engine.spec)
        engine.served = {"tiny": served_model(kind="byte_fallback")}
        await generate(frontend, text="The quick")
        assert prompt_ids(engine.spec) == library_tokenizer("byte_fallback").encode("The quick").ids != first


class TestWayOut:
    async def test_deltas_join_to_the_text_and_the_tokens(self, engine, frontend, library):
        generation = await generate(frontend)
        ids = library.encode(TEXT).ids
        engine.admit(cached_tokens=2)
        reader = asyncio.create_task(drain(generation))
        for token_id in ids:
            engine.push([token_id])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        engine.finish(FinishReason.STOP, stop_token_id=1)
        events = await reader
        assert events[0] == Admitted(2)
        assert (text_of(events), ids_of(events)) == (TEXT, ids)
        assert len(events) > len(ids) / 2  # a reader that keeps up gets them one by one
        end = events[-1]
        assert (end.reason, end.stop_string, end.stop_token_id) == (FinishReason.STOP, None, 1)
        assert (end.usage.output_tokens, end.usage.cached_tokens, end.usage.preemptions) == (len(ids), 3, 1)
        assert not engine.cancelled

    async def test_a_slow_reader_gets_all_tokens_in_few_deltas(self, engine, frontend, library):
        generation = await generate(frontend)
        ids = library.encode(TEXT).ids * 40
        engine.admit()
        engine.push(ids)
        engine.finish()
        events = await drain(generation)
        deltas = [event for event in events if isinstance(event, Delta)]
        assert (text_of(events), ids_of(events)) == (TEXT * 40, ids)
        assert [len(delta.token_ids) for delta in deltas[:-1]] == [MAX_DELTA_TOKENS] * (len(deltas) - 1)

    async def test_candidates_interleave_and_each_ends_once(self, engine, frontend, library):
        generation = await generate(frontend, n=3)
        ids = library.encode(TEXT).ids
        for index in range(3):
            engine.admit(index)
        for index in range(3):
            engine.push(ids[: 3 + index], index)
        engine.finish(index=2)
        engine.push(ids[3:6], 0)
        engine.finish(index=0)
        engine.finish(FinishReason.CANCELLED, index=1)
        events = await drain(generation)
        assert sum(isinstance(event, Admitted) for event in events) == 1
        assert [ids_of(events, index) for index in range(3)] == [ids[:6], ids[:4], ids[:5]]
        reasons = {index: end.reason for index, end in ends_of(events).items()}
        assert reasons == {0: FinishReason.LENGTH, 1: FinishReason.CANCELLED, 2: FinishReason.LENGTH}
        for index in range(3):
            ends = [
                i for i, event in enumerate(events) if isinstance(event, Finished) and event.index == index
            ]
            assert len(ends) == 1
            assert all(getattr(event, "index", None) != index for event in events[ends[0] + 1 :])
        assert await generation.stream.next_event() is None

    @pytest.mark.parametrize("slow", [False, True])
    async def test_a_stop_string_ends_the_text_before_it(self, engine, frontend, library, slow):
        generation = await generate(frontend, stopping=pb.StoppingParams(stop=["nothing", "\njum"]))
        ids = library.encode(TEXT).ids
        reader = None if slow else asyncio.create_task(drain(generation))
        for token_id in ids:
            engine.push([token_id])
            await asyncio.sleep(0)
        events = await (drain(generation) if reader is None else reader)
        used = next(n for n in range(len(ids)) if "\njum" in library.decode(ids[:n]))
        assert engine.stopped == [(generation.request_id, 0, used)]
        assert (text_of(events), ids_of(events)) == ("The quick brown fox", ids[:used])
        end = events[-1]
        assert (end.reason, end.stop_string, end.stop_token_id) == (FinishReason.STOP, "\njum", None)
        assert end.usage.output_tokens == used

    async def test_what_could_be_a_stop_string_waits_and_goes_out_at_the_end(self, engine, frontend, library):
        generation = await generate(frontend, stopping=pb.StoppingParams(stop=["fox!"]))
        engine.push(library.encode("brown fox").ids)
        delta = await generation.stream.next_event()
        assert delta.text == "brown "
        engine.finish()
        events = await drain(generation)
        assert (text_of(events), ids_of(events)) == ("fox", [])
        assert events[-1].reason is FinishReason.LENGTH

    async def test_a_stop_string_that_is_complete_with_the_last_token_wins(self, engine, frontend, library):
        generation = await generate(frontend, stopping=pb.StoppingParams(stop=["fox"]))
        engine.stop = lambda *_: None  # the core has already ended it by length
        engine.push(library.encode("the fox").ids)
        engine.finish(FinishReason.LENGTH)
        events = await drain(generation)
        assert text_of(events) == "the "
        assert (events[-1].reason, events[-1].stop_string) == (FinishReason.STOP, "fox")

    async def test_an_incomplete_character_shows_only_at_the_end(self, engine, frontend, library):
        generation = await generate(frontend)
        engine.push(library.encode("ok 🦖").ids[:-1])
        assert (await generation.stream.next_event()).text == "ok "
        engine.finish()
        events = await drain(generation)
        assert (text_of(events), ids_of(events)) == ("\ufffd", [])

    async def test_logprobs_stay_with_their_tokens(self, engine, frontend):
        generation = await generate(frontend, output=pb.OutputParams(logprobs=2))
        given = [logprobs(-i / 4, [(i, -0.5), (i + 1, -i)]) for i in range(300)]
        engine.push(range(300), logprobs=given)
        engine.finish()
        events = await drain(generation)
        assert ids_of(events) == list(range(300))
        assert [lp for event in events if isinstance(event, Delta) for lp in event.logprobs] == given

    async def test_without_ids_and_text_only_the_end_is_sent(self, engine, frontend):
        generation = await generate(frontend, output=pb.OutputParams(text=False, token_ids=False))
        engine.admit()
        engine.push([5, 6, 7])
        engine.finish()
        events = await drain(generation)
        assert [type(event) for event in events] == [Admitted, Finished]
        assert events[-1].usage.output_tokens == 3

    async def test_special_tokens_are_sent_as_text_if_asked_for(self, engine, frontend, library):
        ids = [*library.encode("Hi").ids, library.token_to_id("<|im_end|>")]
        for skip, text in ((True, "Hi"), (False, "Hi<|im_end|>")):
            generation = await generate(frontend, output=pb.OutputParams(skip_special_tokens=skip))
            engine.push(ids)
            engine.finish()
            assert text_of(await drain(generation)) == text


class TestEnds:
    async def failure(self, generation):
        with pytest.raises(ServiceError) as caught:
            await drain(generation)
        return caught.value

    async def test_a_deadline_fails_the_stream_after_what_was_pending(self, engine, frontend):
        generation = await generate(frontend, n=2)
        engine.push([5], index=1)
        engine.finish(FinishReason.DEADLINE, index=0)
        assert list((await generation.stream.next_event()).token_ids) == [5]
        assert (await self.failure(generation)).reason is Reason.DEADLINE_EXCEEDED
        assert engine.live == {}
        assert (await self.failure(generation)).reason is Reason.DEADLINE_EXCEEDED

    async def test_a_deadline_that_has_passed_is_refused(self, engine, frontend):
        with pytest.raises(ServiceError) as caught:
            await generate(frontend, timeout_s=0.0)
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        assert engine.specs == []

    @pytest.mark.parametrize(("ready", "reason"), [(1, Reason.QUEUE_TIMEOUT), (0, Reason.NO_WORKER)])
    async def test_a_queue_timeout_says_whether_a_worker_is_there(self, engine, frontend, ready, reason):
        generation = await generate(frontend, queue_timeout=Duration(nanos=250_000_000))
        engine.served = {"tiny": served_model(ready_workers=ready)}
        engine.finish(FinishReason.QUEUE_TIMEOUT)
        error = await self.failure(generation)
        assert error.reason is reason
        assert error.metadata["queue_timeout_s"] == "0.25"

    async def test_an_error_is_told_by_an_incident_id_alone(self, engine, frontend, caplog):
        generation = await generate(frontend)
        engine.finish(FinishReason.ERROR, detail="secret cause")
        error = await self.failure(generation)
        assert error.reason is Reason.INTERNAL
        assert "secret" not in error.message
        assert error.metadata["incident_id"] in error.message
        fields = [getattr(record, "fields", None) or record.getMessage() for record in caplog.records]
        assert "secret cause" in str(fields)
        assert error.metadata["incident_id"] in str(fields)

    async def test_closing_cancels_once_and_later_events_are_ignored(self, engine, frontend):
        generation = await generate(frontend, n=2)
        engine.admit()
        engine.push([5])
        generation.stream.close()
        generation.stream.close()
        assert engine.cancelled == [generation.request_id]
        engine.spec.sink.push_tokens(1, 6, None)
        assert await generation.stream.next_event() is None

    async def test_closing_after_the_end_cancels_nothing(self, engine, frontend):
        generation = await generate(frontend)
        engine.finish()
        await drain(generation)
        generation.stream.close()
        assert engine.cancelled == []

    async def test_closing_wakes_the_reader(self, engine, frontend):
        generation = await generate(frontend)
        reader = asyncio.create_task(drain(generation))
        await asyncio.sleep(0)
        generation.stream.close()
        assert await reader == []

    async def test_cancel_by_name_ends_the_stream_with_finished(self, engine, frontend):
        generation = await generate(frontend, request_id="x")
        engine.push([5])
        assert await frontend.cancel(pb.CancelRequest(request_id="x")) is True
        events = await drain(generation)
        assert events[-1].reason is FinishReason.CANCELLED
        assert ids_of(events) == [5]
        assert await frontend.cancel(pb.CancelRequest(request_id="x")) is False


async def test_a_requests_time_counts_from_its_arrival_at_the_frontend(engine, frontend):
    read = frontend._texts.get

    async def read_slowly(model):
        engine.clock += 2.5
        return await read(model)

    frontend._texts.get = read_slowly
    await generate(frontend)
    assert (engine.spec.arrival, engine.clock) == (1000.0, 1002.5)
