"""A request's grammar reaches each worker that takes it, whatever way it comes; and how its end is told."""

import json
from dataclasses import replace

from core_harness import EOS, Harness
from test_core_stop_rules import outputs, say
from test_link_codec import LIMITS, ints

from scheduler_service.core.events import FinishReason
from scheduler_service.frontend_codec import decode_spec, encode_spec
from scheduler_service.journal_codec import Acceptance, decode_acceptance, encode_acceptance
from scheduler_service.plan_codec import decode_result, encode_plan
from scheduler_service.presentation import Presentation
from tidegate.worker.v1 import worker_pb2 as pb

GRAMMAR = 'start: "é"\n'


def spec(**changes):
    return replace(Harness().spec("r", 5, n=2), grammar=GRAMMAR, **changes)


def test_every_candidate_takes_its_grammar_to_the_worker_at_each_admission():
    h = Harness()
    h.accept("a", 3, n=2, max_tokens=9, grammar=GRAMMAR)
    h.accept("b", 3, max_tokens=9)
    admitted = {}
    while len(admitted) < 3:
        plan = h.plan()
        admitted |= {(each.request_id, each.index): each.grammar for each in plan.admitted}
        wire = encode_plan(plan).plan
        assert [each.grammar for each in wire.admitted] == [each.grammar for each in plan.admitted]
        h.answer()
    assert admitted == {("a", 0): GRAMMAR, ("a", 1): GRAMMAR, ("b", 0): ""}


def test_the_journal_has_it_and_journals_from_before_have_none():
    text, prompt = encode_acceptance(Acceptance(spec(), Presentation(), "f", None))
    assert decode_acceptance(text, prompt).spec.grammar == GRAMMAR
    values = json.loads(text)
    del values["grammar"]
    assert decode_acceptance(json.dumps(values), prompt).spec.grammar == ""


def test_the_link_of_frontends_has_it():
    given = spec()
    values = json.loads(json.dumps(encode_spec(given)))
    assert decode_spec(values, given.prompt_token_ids, None).grammar == GRAMMAR


def test_end_of_text_ends_a_complete_form_before_min_tokens():
    options = {"eos_token_ids": frozenset([EOS]), "min_tokens": 6}
    end = outputs(Harness(), 5, EOS, grammar=GRAMMAR, **options)
    assert (end.reason, end.stop_token_id, end.usage.output_tokens) == (FinishReason.STOP, EOS, 2)
    assert outputs(Harness(), 5, EOS, 6, **options) is None


def test_a_lost_grammar_ends_its_candidate_and_no_other():
    h = Harness()
    h.accept("a", 3, max_tokens=9, grammar=GRAMMAR)
    h.accept("b", 3, max_tokens=9)
    h.plan()
    say(h, 5, 6, failed_rows=frozenset([0]), grammar_failed_rows=frozenset([0]))
    assert h.seen["a", 0].finished.reason is FinishReason.GRAMMAR
    assert h.seen["b", 0].tokens == [6]
    assert h.seen["b", 0].finished is None


def test_a_result_names_lost_grammars_among_its_failed_rows():
    message = pb.StepResult(seq=1, slots=ints(1, 7, 3), token_ids=ints(5, 6, 7), failed_rows=ints(0, 2))
    message.grammar_failed_rows = ints(1, 2)
    result = decode_result(message, LIMITS)
    assert (result.failed_rows, result.grammar_failed_rows) == (frozenset([0, 2]), frozenset([2]))
