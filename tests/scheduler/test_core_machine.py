"""The whole core, driven at random: whatever happens, everyone gets their own tokens, once and in order."""

from __future__ import annotations

import pytest
from core_harness import EOS, MACHINE, Harness, expected_outputs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_service.core.admission import Refused
from scheduler_service.core.events import FinishReason
from scheduler_service.core.policies import POLICIES

OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)

configs = st.fixed_dictionaries(
    {
        "depth": st.integers(1, 3),
        "workers": st.integers(1, 3),
        "num_blocks": st.integers(10, 24),
        "block_size": st.sampled_from([1, 2, 2, 4, 4]),
        "num_slots": st.integers(2, 6),
        "max_batched_tokens": st.integers(3, 24),
        "max_num_seqs": st.integers(2, 6),
        "max_num_batched_tokens": st.integers(6, 24),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
        "watermark": st.sampled_from([0.0, 0.1, 0.5]),
        "target_itl_ms": st.sampled_from([None, None, 0.01, 6.2]),
        "binding": st.sampled_from(["cost", "cost", "load", "prefix"]),
        "long_prefill_token_threshold_adaptive": st.booleans(),
        "policy": st.sampled_from(sorted(POLICIES)),
        "priority_aging_s": st.sampled_from([None, 1.0]),
        "tenant_weights": st.sampled_from([{}, {"a": 2.5}]),
        "admission": st.sampled_from(["watermark", "watermark", "predicted"]),
        "max_moves_without_progress": st.sampled_from([1, 5]),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
        "preemption_mode": st.sampled_from(["swap", "swap", "auto", "recompute"]),
        "num_host_blocks": st.sampled_from([0, 3, 12, 40]),
        "block_copy_ms": st.sampled_from([0.0, 0.001, 10.0]),
        "max_preemptions": st.sampled_from([0, 2, 8]),
        "overtaking_window": st.sampled_from([0, 1, 16]),
        "max_overtakes": st.sampled_from([0, 2, 64]),
        "max_num_queued_reqs": st.sampled_from([None, None, 6]),
        "max_num_queued_tokens": st.sampled_from([None, None, 60]),
        "max_num_queued_reqs_per_tenant": st.sampled_from([None, None, 3]),
        "max_num_queued_tokens_per_tenant": st.sampled_from([None, None, 30]),
    }
)


def sometimes(call):
    """Makes a rule that undoes work a rare one: hypothesis picks rules evenly."""

    def rarely(self, data, **values):
        if data.draw(st.integers(0, 4)) == 0:
            call(self, data=data, **values)

    rarely.__name__ = call.__name__
    return rarely


class CoreMachine(RuleBasedStateMachine):
    """Calls in any order, results late, workers lost and back. check() runs after every call."""

    checks_each_call = True

    @initialize(config=configs)
    def start(self, config):
        self.h = Harness(check=self.checks_each_call, **config)
        self.num_requests = 0
        self.refused = 0
        self.stopped: dict[tuple[str, int], int] = {}
        self.num_ids = len(self.h.workers)

    @rule(
        prefix=st.integers(0, 2),
        shared=st.integers(0, 16),
        own=st.integers(1, 12),
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 3),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("abc"),
        salt=st.sampled_from(["", "", "salt"]),
        deadline_s=st.sampled_from([None, None, None, 4.0]),
        queue_timeout_s=st.sampled_from([None, None, None, 2.0]),
        eos=st.booleans(),
    )
    def submit(self, prefix, shared, own, min_tokens, max_tokens, deadline_s, eos, **options):
        self.num_requests += 1
        name = f"r{self.num_requests}"
        prompt = [(prefix * 17 + i) % 64 for i in range(shared)] + [
            (self.num_requests * 5 + i) % 64 for i in range(own)
        ]
        options["cache_salt"] = options.pop("salt")
        options["deadline"] = None if deadline_s is None else self.h.now + deadline_s
        options["eos_token_ids"] = frozenset([EOS, 2, 3, 4] if eos else [])
        options["min_tokens"] = min(min_tokens, max_tokens)
        outcome = self.h.submit(name, prompt, max_tokens, **options)
        self.refused += isinstance(outcome, Refused)

    def _pick(self, data) -> tuple[str, int]:
        states = self.h.core.requests(self.h.now, limit=10_000)
        chosen = data.draw(st.sampled_from(states))
        return chosen.request_id, chosen.index

    def _any_request(self) -> bool:
        return bool(self.h.core.requests(self.h.now, limit=1))

    @precondition(_any_request)
    @rule(data=st.data(), whole=st.booleans())
    @sometimes
    def cancel(self, data, whole):
        request_id, index = self._pick(data)
        assert self.h.cancel(request_id, None if whole else index)

    @precondition(_any_request)
    @rule(data=st.data())
    @sometimes
    def stop(self, data):
        request_id, index = self._pick(data)
        num = data.draw(st.integers(0, len(self.h.seen[request_id, index].tokens)))
        (event,) = self.h.note(self.h.core.stop(request_id, index, num, self.h.now))
        assert event.usage.output_tokens == num
        self.stopped[request_id, index] = num

    @precondition(lambda self: self.h.workers)
    @rule(data=st.data(), times=st.integers(1, 3))
    def plan(self, data, times):
        worker_id = data.draw(st.sampled_from(sorted(self.h.workers)))
        for _ in range(times):
            self.h.plan(worker_id)

    @precondition(lambda self: any(worker.inbox for worker in self.h.workers.values()))
    @rule(data=st.data(), fail=st.sampled_from([False] * 15 + [True]))
    def answer(self, data, fail):
        busy = sorted(name for name, worker in self.h.workers.items() if worker.inbox)
        worker_id = data.draw(st.sampled_from(busy))
        worker = self.h.workers[worker_id]
        if fail and self._any_request():
            worker.fail.add(self._pick(data))
        self.h.answer(worker_id)
        worker.fail.clear()

    @rule(worker_rounds=st.integers(1, 6))
    def steps(self, worker_rounds):
        for _ in range(worker_rounds):
            for worker_id in list(self.h.workers):
                self.h.plan(worker_id)
                if self.h.workers[worker_id].inbox:
                    self.h.answer(worker_id)

    @precondition(lambda self: self.h.workers)
    @rule(data=st.data())
    @sometimes
    def lose(self, data):
        self.h.lose(data.draw(st.sampled_from(sorted(self.h.workers))))

    @precondition(lambda self: self.h.workers)
    @rule(data=st.data())
    @sometimes
    def drain(self, data):
        worker_id = data.draw(st.sampled_from(sorted(self.h.workers)))
        self.h.note(self.h.core.drain_worker(worker_id, self.h.now))
        assert self.h.plan(worker_id) is None

    @precondition(lambda self: len(self.h.workers) < 3)
    @rule(block_size=st.sampled_from([None, 1, 4]))
    def connect(self, block_size):
        self.num_ids += 1
        self.h.add_worker(f"w{self.num_ids}", **({"block_size": block_size} if block_size else {}))

    @rule(seconds=st.sampled_from([0.25, 1.0]))
    def tick(self, seconds):
        self.h.now += seconds
        due = self.h.core.next_expiry()
        events = self.h.note(self.h.core.expire(self.h.now))
        assert not events or (due is not None and due <= self.h.now)
        due = self.h.core.next_expiry()
        assert due is None or due > self.h.now

    @rule()
    def forget(self):
        self.h.checked(self.h.core.reset_prefix_cache())

    def teardown(self):
        if not hasattr(self, "h"):
            return
        h = self.h
        for worker_id in list(h.workers):
            if data_is_odd(worker_id):
                h.lose(worker_id)
        h.add_worker("last", block_size=1, num_blocks=120, num_slots=6, max_batched_tokens=40)
        h.run()
        h.assert_empty()
        for request_id, spec in h.specs.items():
            for index in range(spec.n):
                self._assert_told_right(request_id, index)
        counters = h.core.state(h.now).counters
        assert counters.output_tokens == sum(len(seen.tokens) for seen in h.seen.values())
        ended = counters.requests_finished + counters.requests_cancelled + counters.requests_failed
        assert counters.requests_accepted == ended == sum(spec.n for spec in h.specs.values())

    def _assert_told_right(self, request_id, index):
        seen = self.h.seen[request_id, index]
        tokens, reason = expected_outputs(self.h.specs[request_id], index)
        end = seen.finished
        assert end is not None
        assert seen.tokens == tokens[: len(seen.tokens)]
        if end.reason in OWN_ENDS and (request_id, index) not in self.stopped:
            assert (seen.tokens, end.reason) == (tokens, reason)
        timings = end.timings
        total = timings.queue_s + timings.prefill_s + timings.decode_s + timings.preempted_s
        assert total >= 0 and (timings.time_to_first_token_s is None) == (not seen.tokens)
        kinds = seen.kinds
        assert kinds.count("Admitted") <= 1 and kinds[-1] == "Finished"
        assert kinds.count("Preempted") == end.usage.preemptions
        assert kinds.count("Preempted") - kinds.count("Resumed") in (0, 1)
        assert "Admitted" in kinds or not seen.tokens


def data_is_odd(worker_id: str) -> bool:
    """Half of the workers are lost at the end."""
    return int(worker_id[1:]) % 2 == 1


TestCore = CoreMachine.TestCase
TestCore.settings = settings(MACHINE, stateful_step_count=50)


class LongMachine(CoreMachine):
    """Checks after each rule, which makes a few calls, so that many of them end in minutes."""

    checks_each_call = False
    num_steps = 0

    @invariant()
    def sound(self):
        if hasattr(self, "h"):
            self.h.core.check()
            LongMachine.num_steps += 1


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two minutes of computing, on a machine that may do other things
class TestCoreForLong(LongMachine.TestCase):
    """The same over 100,000 steps."""

    settings = settings(MACHINE, max_examples=2500, stateful_step_count=50)

    def runTest(self):
        super().runTest()
        assert LongMachine.num_steps >= 100_000
