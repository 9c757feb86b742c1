"""Whatever the schema, what comes out is valid: in shared batches, with preemption, after a lost worker."""

from __future__ import annotations

import asyncio
import json

import pytest
from byte_tokenizer import END, FIRST_BYTE, save_model
from e2e.deployment import Deployment, deploy
from e2e.schema_set import Schema, make_schemas
from jsonschema import Draft202012Validator

from tidegate_client import FinishReason, Generation, Grammar, InvalidRequestError

# So little memory that batches of 16 are preempted again and again.
WORKER = {"num_blocks": 36, "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 256}
WORKER |= {"max_model_len": 512}
SCHEDULER = {"watermark": 0.0}
SET_SIZE, PARTS = 200, 4
MAX_TOKENS, LONGEST = 200, 480


async def fill(deployment: Deployment, schema: Schema, seed: int) -> Generation:
    prompt = f"Write an example as JSON ({seed})."
    stream = deployment.client.chat(
        prompt, json_schema=schema, temperature=1.0, seed=seed, max_tokens=MAX_TOKENS
    )
    async for _ in stream:
        pass
    (generation,) = stream.generations()
    return generation


def check(schema: Schema, generation: Generation) -> None:
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    validator.validate(json.loads(generation.text))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
async def test_every_output_of_a_schema_set_is_valid(smollm2, part):
    schemas = make_schemas(SET_SIZE, seed=1)[part::PARTS]
    async with deploy(smollm2, WORKER, SCHEDULER) as deployment:
        free = asyncio.create_task(deployment.generate_all([[5, 6, 7], [8, 9]], max_tokens=200))
        calls = (fill(deployment, schema, seed) for seed, schema in enumerate(schemas))
        generations = await asyncio.gather(*calls)
        together = await free
        preemptions = deployment.counters().preemptions
        assert await deployment.generate_all([[5, 6, 7], [8, 9]], max_tokens=200) == together
        deployment.check_empty()
    complete = [FinishReason.STOP is generation.finished.reason for generation in generations]
    for schema, generation in zip(schemas, generations, strict=True):
        if generation.finished.reason is FinishReason.STOP:
            check(schema, generation)
    print(f"valid: {sum(complete)} of {len(schemas)}; cut by max_tokens: {len(schemas) - sum(complete)}")
    assert sum(complete) >= 0.9 * len(schemas)
    assert preemptions > 0


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("bytes"))


LIST = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}}
LIST |= {"minItems": 130, "maxItems": 130}  # so long that a worker can end before it


async def generate(deployment: Deployment, **options) -> list[Generation]:
    stream = deployment.client.generate("Once", temperature=1.0, max_tokens=LONGEST, **options)
    async for _ in stream:
        pass
    return stream.generations()


async def test_a_form_survives_the_loss_of_its_worker(byte_model):
    async with deploy(byte_model, num_workers=2) as deployment:
        alone = await generate(deployment, json_schema=LIST, seed=1, n=3)
        running = asyncio.create_task(generate(deployment, json_schema=LIST, seed=1, n=3))
        begun = deployment.counters().output_tokens
        await deployment.until(lambda: deployment.counters().output_tokens > begun + 30)
        busy = [worker.running_requests > 0 for worker in deployment.service.engine.state().workers]
        await deployment.stop_worker(busy.index(True))
        generations = await running
    for generation, undisturbed in zip(generations, alone, strict=True):
        check(LIST, generation)
        assert generation.text == undisturbed.text
    assert sum(generation.finished.usage.preemptions for generation in generations) > 0


async def test_candidates_choose_for_themselves_within_one_form(byte_model):
    async with deploy(byte_model) as deployment:
        generations = await generate(deployment, regex="[a-z]{12}", seed=5, n=4, logprobs=2)
    texts = [generation.text for generation in generations]
    assert all(len(text) == 12 and text.isascii() and text.islower() for text in texts)
    assert len(set(texts)) == 4
    for generation in generations:
        assert generation.finished.reason is FinishReason.STOP
        assert generation.finished.stop == END
        assert generation.finished.usage.output_tokens == len(generation.logprobs) == 13
    # Log-probabilities are the model's own, which would often have said something else.
    entries = [entry for generation in generations for entry in generation.logprobs]
    assert all(entry.sampled.logprob <= entry.top[0].logprob for entry in entries)
    assert any(entry.sampled.token_id not in {top.token_id for top in entry.top} for entry in entries)


async def test_the_form_decides_where_min_tokens_and_biases_want_otherwise(byte_model):
    forced = {FIRST_BYTE + 5: 100.0, END: 100.0}
    async with deploy(byte_model) as deployment:
        (generation,) = await generate(deployment, regex="(ab){4}", min_tokens=40, logit_bias=forced)
        (longer,) = await generate(deployment, regex="(ab){4}c*", min_tokens=20, logit_bias=forced)
    assert (generation.text, generation.finished.reason) == ("abababab", FinishReason.STOP)
    # Where it may end or go on, min_tokens decides; then the bias ends it.
    assert (longer.text, longer.finished.reason) == ("abababab" + "c" * 12, FinishReason.STOP)


async def test_a_form_that_becomes_too_complex_ends_its_request_alone(byte_model):
    async with deploy(byte_model) as deployment:
        others = asyncio.create_task(deployment.generate_all([[5, 6, 7]] * 3, max_tokens=60))
        with pytest.raises(InvalidRequestError) as caught:
            await generate(deployment, regex="(a{1,1000}){1,1000}", logit_bias={END: -100.0})
        assert caught.value.reason == "GRAMMAR_TOO_COMPLEX"
        assert [len(output[0]) for output in await others] == [60] * 3
        deployment.check_empty()


async def test_a_form_that_is_none_is_refused_at_once_and_costs_others_nothing(byte_model):
    endless = {"type": "integer", "multipleOf": 999_983}
    async with deploy(byte_model) as deployment:
        others = asyncio.create_task(deployment.generate_all([[5, 6, 7]] * 3, max_tokens=60))
        for form in (
            {"json_schema": "{"},
            {"json_schema": {"not": {}}},
            {"json_schema": endless},
            {"regex": "(?=a)b"},
            {"grammar": "start: nowhere"},
            {"grammar": Grammar('root = "no"', "ebnf")},
        ):
            with pytest.raises(InvalidRequestError) as caught:
                await generate(deployment, **form)
            assert caught.value.reason == "INVALID_GRAMMAR"
            assert caught.value.violations[0].field.startswith("structured_output.")
        assert [len(output[0]) for output in await others] == [60] * 3
        assert deployment.counters().requests_accepted == 3
        choices = await generate(deployment, choice=["one", "two"])
        assert choices[0].text in ("one", "two")
        yes = await generate(deployment, grammar=Grammar('root ::= "yes" | "no"', "ebnf"))
        assert yes[0].text in ("yes", "no")
