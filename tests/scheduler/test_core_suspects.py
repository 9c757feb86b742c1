"""What ends every worker that runs it ends alone: those who were beside it by chance are not lost with it."""

from __future__ import annotations

from core_harness import MACHINE, Harness
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.events import FinishReason


class Deadly(Harness):
    """Workers that end whenever a plan has a poison in it, and come back at once."""

    def __init__(self, num_workers: int, **options) -> None:
        super().__init__(workers=num_workers, **options)
        self.num_deaths = 0

    def turn(self) -> bool:
        """Each worker gets its plans, and answers one of them or ends. Whether there was anything to do."""
        busy = False
        for name in list(self.workers):
            while self.plan(name) is not None:
                busy = True
            self.check_suspects(name)
            if any(each.startswith("poison") for each in self.running(name)):
                self.lose(name)
                self.add_worker(name)
                self.num_deaths += 1
            elif self.workers[name].inbox:
                busy = True
                self.answer(name)
        return busy

    def check_suspects(self, name: str) -> None:
        suspects = [request for request in self.core._workers[name].running if request.is_suspect]
        assert len(suspects) <= 1

    def finish(self) -> None:
        for _ in range(3000):
            if not self.turn():
                return
        raise AssertionError("not done after 3000 turns")


def test_a_poison_takes_nobody_with_it():
    h = Deadly(1, max_moves_without_progress=2)
    for i in range(8):
        h.accept(f"before{i}", 6, 3)
    h.accept("poison", 6, 3)
    for i in range(8):
        h.accept(f"after{i}", 6, 3)
    h.finish()
    assert h.seen["poison", 0].finished.reason is FinishReason.ERROR
    assert h.num_deaths == 3
    del h.specs["poison"]
    h.assert_all_right()
    h.assert_empty()


def test_suspects_are_tried_one_at_a_time_beside_others_until_a_token_comes():
    h = Harness(max_moves_without_progress=5)
    h.accept("a", 6, 4)
    h.accept("b", 6, 4)
    for _ in range(2):
        h.plan()
        h.lose()
        h.add_worker()
    h.accept("new", 6, 4)
    h.plan()
    assert h.running() == ["a", "new"]
    (why,) = h.core.explain("b", h.now)
    assert [blocker.other for blocker in why.blockers] == ["a"]
    assert "has lost 2 workers in a row" in why.blockers[0].text
    h.answer()
    h.plan()
    assert h.running() == ["a", "new", "b"]
    h.run()
    h.assert_all_right()


@given(
    num_workers=st.integers(1, 3),
    most=st.integers(2, 5),
    arrivals=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(0, 3)), max_size=14),
    poison_at=st.integers(0, 14),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
)
@MACHINE
def test_whoever_comes_with_a_poison_gets_its_tokens(num_workers, most, arrivals, poison_at, policy):
    h = Deadly(num_workers, max_moves_without_progress=most, policy=policy, max_num_batched_tokens=48)
    for i, (prompt, max_tokens, num_turns) in enumerate(arrivals):
        if i == poison_at:
            h.accept("poison", 7, 3)
        h.accept(f"r{i}", prompt, max_tokens)
        for _ in range(num_turns):
            h.turn()
    h.finish()
    if h.specs.pop("poison", None) is not None:
        assert h.seen["poison", 0].finished.reason is FinishReason.ERROR
        assert h.num_deaths == most + 1
    h.assert_all_right()
    h.assert_empty()
