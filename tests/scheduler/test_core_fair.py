"""The policy `fair`: tenants share by weight, within the bound that the policy states."""

from __future__ import annotations

from collections import Counter

from core_harness import MACHINE, Harness
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.policies import fair as fair_policy


def fair(**options: object) -> Harness:
    return Harness(policy="fair", **{"check": False, "num_blocks": 2049, **options})


def admitted(plan) -> list[str]:
    return [a.request_id for a in plan.admitted]


class Served:
    """Tokens that each tenant was served: prompts at admission, outputs as they come."""

    def __init__(self, h: Harness) -> None:
        self.h = h
        self.tokens: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()

    def submit(self, name: str, tenant: str, prompt: int, max_tokens: int) -> None:
        self.h.accept(name, prompt, max_tokens, tenant=tenant)
        self.waiting[tenant] += 1

    def step(self) -> None:
        before = {key: len(seen.tokens) for key, seen in self.h.seen.items()}
        plan = self.h.step()
        for admission in plan.admitted:
            tenant = self.h.specs[admission.request_id].tenant
            self.tokens[tenant] += len(admission.token_ids) - admission.num_computed_tokens
            self.waiting[tenant] -= 1
        for key, seen in self.h.seen.items():
            self.tokens[self.h.specs[key[0]].tenant] += len(seen.tokens) - before.get(key, 0)


def test_tenants_take_turns_whoever_came_first():
    h = fair(max_num_seqs=4)
    for i in range(6):
        h.accept(f"a{i}", 8, 2, tenant="a")
    for i in range(2):
        h.accept(f"b{i}", 8, 2, tenant="b")
    assert admitted(h.plan()) == ["a0", "b0", "a1", "b1"]


def test_within_a_tenant_the_first_comes_first():
    h = fair(max_num_seqs=1)
    for i in range(4):
        h.accept(f"a{i}", 8, 1, tenant="a")
    assert [admitted(h.step()) for _ in range(4)] == [["a0"], ["a1"], ["a2"], ["a3"]]


def test_long_prompts_count_for_more():
    h = fair(max_num_seqs=5)
    for i in range(5):
        h.accept(f"long{i}", 40, 2, tenant="a")
        h.accept(f"short{i}", 10, 2, tenant="b")
    assert admitted(h.plan()) == ["long0", "short0", "short1", "short2", "short3"]


def test_a_prefix_that_is_cached_costs_nothing():
    h = fair(max_num_seqs=1)
    h.accept("first", [5] * 40, 1, tenant="x")
    h.step()
    h.accept("hit", [5] * 40, 1, tenant="a")
    h.accept("a", 20, 1, tenant="a")
    h.accept("b", 20, 1, tenant="b")
    assert [admitted(h.step())[0] for _ in range(3)] == ["hit", "b", "a"]


def test_a_heavier_tenant_gets_its_share():
    h = fair(max_num_seqs=2, tenant_weights={"gold": 3.0})
    served = Served(h)
    for i in range(60):
        served.submit(f"g{i}", "gold", 8, 4)
        served.submit(f"b{i}", "basic", 8, 4)
    while min(served.waiting.values()):
        served.step()
        assert abs(served.tokens["gold"] / 3 - served.tokens["basic"]) <= 2 * 12
    assert served.tokens["gold"] > 2.5 * served.tokens["basic"]


@MACHINE
@given(
    a=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=30, max_size=60),
    b=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=4, max_size=8),
    seats=st.integers(1, 6),
)
def test_two_tenants_of_which_one_sends_far_more_are_served_alike_within_the_bound(a, b, seats):
    h = fair(max_num_seqs=seats)
    served = Served(h)
    for i, (prompt, outputs) in enumerate(a):
        served.submit(f"a{i}", "a", prompt, outputs)
    for i, (prompt, outputs) in enumerate(b):
        served.submit(f"b{i}", "b", prompt, outputs)
    bound = seats * max(prompt + outputs for prompt, outputs in a + b)
    while served.waiting["a"] and served.waiting["b"]:
        served.step()
        if served.waiting["a"] and served.waiting["b"]:
            assert abs(served.tokens["a"] - served.tokens["b"]) <= bound
    h.run()
    h.assert_all_right()


def test_a_tenant_cannot_save_up_while_it_sends_nothing():
    h = fair(max_num_seqs=1)
    for i in range(12):
        h.accept(f"a{i}", 10, 1, tenant="a")
    for _ in range(8):
        h.step()
    for i in range(4):
        h.accept(f"b{i}", 10, 1, tenant="b")
    order = [admitted(h.step())[0][0] for _ in range(8)]
    assert Counter(order[:6]) == {"a": 3, "b": 3}


def test_the_tenant_that_was_served_most_makes_room():
    h = fair(num_blocks=9, block_size=4)
    h.accept("a0", 8, 20, tenant="a")
    h.accept("a1", 8, 20, tenant="a")
    h.step()
    h.accept("b0", 8, 20, tenant="b")
    while h.core.state(0.0).counters.preemptions == 0:
        h.step()
    assert [name for (name, _), seen in h.seen.items() if "Preempted" in seen.kinds] == ["a1"]
    h.run()
    h.assert_all_right()


def test_a_preempted_one_comes_before_tenants_that_were_served_less():
    h = fair(num_blocks=9, block_size=4, max_num_seqs=2)
    h.accept("a0", 8, 20, tenant="a")
    h.accept("a1", 8, 20, tenant="a")
    while h.core.state(0.0).counters.preemptions == 0:
        h.step()
    h.accept("b0", 4, 2, tenant="b")
    h.run()
    order = [a.request_id for plan in h.plans for a in plan.admitted]
    assert order.index("b0") > [i for i, name in enumerate(order) if name == "a1"][1]
    h.assert_all_right()


def test_cancelled_requests_leave_their_tenants_lane():
    h = fair(max_num_seqs=1, check=True)
    for tenant in "abc":
        for i in range(3):
            h.accept(f"{tenant}{i}", 5, 2, tenant=tenant)
    for i in range(3):
        h.cancel(f"b{i}")
    h.run()
    h.assert_empty()
    assert [a.request_id for plan in h.plans for a in plan.admitted] == ["a0", "c0", "a1", "c1", "a2", "c2"]


def test_a_request_without_room_keeps_its_tenants_turn():
    h = fair(num_blocks=11, block_size=4, max_num_seqs=8)
    h.accept("running", 17, 20, tenant="x")
    h.step()
    h.accept("big", 24, 2, tenant="a")
    h.accept("small", 3, 1, tenant="b")
    assert admitted(h.step()) == ["small"]
    assert h.core._lifecycle.models["fake"].queue.head().request_id == "big"
    h.run()
    h.assert_all_right()


def test_accounts_of_tenants_that_are_gone_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(fair_policy, "_KEPT_ACCOUNTS", 8)
    h = fair(max_num_seqs=1)
    for i in range(40):
        h.accept(f"r{i}", 4, 1, tenant=f"t{i}")
        h.accept(f"again{i}", 4, 1, tenant="always")
        h.run()
    assert len(h.core._policy._accounts) <= 16
    h.assert_all_right()


def test_explained_order_is_the_order_of_turns():
    h = fair(max_num_seqs=1)
    h.accept("a0", 20, 1, tenant="a")
    h.step()
    waiting = {name: h.accept(name, 5, 1, tenant=name[0]) for name in ("a1", "b0", "a2", "b1")}
    heap = h.core._lifecycle.models["fake"].queue._heap
    assert [r.request_id for r in heap.before(waiting["a2"])] == ["b0", "b1", "a1"]
    assert [r.request_id for r in heap.before(waiting["b1"])] == ["b0"]
    assert heap.before(waiting["b0"]) == []
