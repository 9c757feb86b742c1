"""Streams take turns with the rest of the event loop."""

import asyncio

from scheduler_service.turnstile import Turnstile


def enter(turnstile: Turnstile, count: int) -> list[asyncio.Future]:
    waiters = [asyncio.get_running_loop().create_future() for _ in range(count)]
    for waiter in waiters:
        turnstile.enter(waiter)
    return waiters


def through(waiters) -> list[bool]:
    return [waiter.done() for waiter in waiters]


async def test_a_few_pass_at_once_and_the_others_in_order_a_turn_each():
    waiters = enter(Turnstile(per_turn=2), 5)
    assert through(waiters) == [True, True, False, False, False]
    await asyncio.sleep(0)
    assert through(waiters) == [True, True, True, True, False]
    await asyncio.sleep(0)
    assert through(waiters) == [True] * 5


async def test_those_who_come_later_do_not_overtake():
    turnstile = Turnstile(per_turn=1)
    first = enter(turnstile, 3)
    await asyncio.sleep(0)
    late = enter(turnstile, 1)
    assert through([*first, *late]) == [True, True, False, False]
    await asyncio.sleep(0)
    assert through([*first, *late]) == [True, True, True, False]
    await asyncio.sleep(0)
    assert through(late) == [True]


async def test_those_who_have_gone_take_no_place():
    turnstile = Turnstile(per_turn=1)
    waiters = enter(turnstile, 3)
    waiters[1].cancel()
    await asyncio.sleep(0)
    assert waiters[2].done()


async def test_each_turn_has_its_own_few():
    turnstile = Turnstile(per_turn=1)
    for _ in range(3):
        (waiter,) = enter(turnstile, 1)
        assert waiter.done()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
