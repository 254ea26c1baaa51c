import asyncio
import contextlib
import random

import pytest

from multus_daemon.runtime.slots import URGENT, NoSlotError, Slots


async def settled():
    """Whatever can go on has gone on."""
    for _ in range(6):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def holding(slots, *what):
    slot = await slots.take(*what)
    try:
        yield
    finally:
        slots.give_back(slot)


class Crowd:
    """Tasks that take a slot, and the order in which they got it."""

    def __init__(self, slots):
        self.slots = slots
        self.order = []
        self.tasks = []
        self.ends = {}

    async def come(self, name, key="", rank=1, timeout=30, groups=()):
        """Ask for a slot; returns once the task waits or has it."""
        self.ends[name] = asyncio.Event()

        async def work():
            async with holding(self.slots, key or name, rank, timeout, groups):
                self.order.append(name)
                await self.ends[name].wait()

        self.tasks.append(asyncio.create_task(work(), name=name))
        await settled()
        return self.tasks[-1]

    async def go(self, name):
        """Let one end."""
        self.ends[name].set()
        await settled()

    async def all(self):
        """Let all end, one after the other; the order in which they began."""
        async with asyncio.timeout(10):
            while not all(task.done() for task in self.tasks):
                unfinished = [name for name in self.order if not self.ends[name].is_set()]
                await (self.go(unfinished[0]) if unfinished else asyncio.sleep(0))
        await asyncio.gather(*self.tasks)
        assert (self.slots.running, self.slots.waiting) == (0, 0)
        return self.order


async def test_no_more_than_the_size():
    crowd = Crowd(Slots(3))
    for number in range(8):
        await crowd.come(str(number))
    assert (crowd.slots.running, crowd.slots.waiting) == (3, 5)
    await crowd.go("1")
    assert (crowd.slots.running, crowd.slots.waiting) == (3, 4)
    assert await crowd.all() == list("01234567")


async def test_the_lower_rank_first():
    crowd = Crowd(Slots(1))
    for name, rank in (("x", 2), ("c", 3), ("a", 2), ("b", 2), ("s", 1), ("d", URGENT)):
        await crowd.come(name, rank=rank)
    assert await crowd.all() == ["x", "d", "s", "a", "b", "c"]


async def test_one_slot_is_for_everybody():
    crowd = Crowd(Slots(1, reserved=1))
    await crowd.come("a")
    assert await crowd.all() == ["a"]


async def test_a_wait_in_vain():
    crowd = Crowd(Slots(1))
    await crowd.come("a")
    waiting = [await crowd.come(name, timeout=0.05) for name in ("b", "c")]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [result.waiting for result in results if isinstance(result, NoSlotError)] == [2, 1]
    crowd.tasks = crowd.tasks[:1]
    assert await crowd.all() == ["a"]


async def test_nothing_is_lost_whatever_happens():
    choose = random.Random(7)
    slots = Slots(4, reserved=1, kept=1)
    most = 0

    async def work(number):
        nonlocal most
        with contextlib.suppress(NoSlotError), slots.hurried("k1") if number % 9 == 0 else contextlib.nullcontext():
            groups = (choose.choice(("", "a", "b")), choose.choice(("", "x", "y")))
            async with holding(
                slots, f"k{number % 5}", choose.randrange(3), choose.choice((0, 0.001, 0.01, 5)), groups
            ):
                most = max(most, slots.running)
                await asyncio.sleep(choose.choice((0, 0.001, 0.003)))

    tasks = [asyncio.create_task(work(number)) for number in range(300)]
    for task in choose.sample(tasks, 60):
        await asyncio.sleep(0.0005)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 4
    assert (slots.running, slots.waiting) == (0, 0)
    async with holding(slots, "x", 2, 0):
        pass


# --- groups ----------------------------------------------------------------------------------------------------------


async def test_groups_take_turns():
    """Also where those of one come first, and each with a key of its own."""
    crowd = Crowd(Slots(1))
    for number in range(6):
        await crowd.come(f"a{number}", groups=("a", "x"))
    for name in ("b0", "b1"):
        await crowd.come(name, groups=("b", "x"))
    await crowd.come("c0", groups=("a", "y"))
    assert await crowd.all() == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4", "a5"]


async def test_within_a_group_keys_take_turns():
    crowd = Crowd(Slots(1))
    for number in range(3):
        await crowd.come(f"big{number}", key="big", groups=("a", "x"))
    await crowd.come("small", groups=("a", "x"))
    assert await crowd.all() == ["big0", "big1", "small", "big2"]


@pytest.mark.parametrize(
    ("size", "kept", "together", "single"),
    [
        (1, 1, 1, 1), (2, 1, 1, 2), (3, 1, 2, 3), (4, 1, 2, 3), (7, 1, 5, 6), (15, 1, 13, 14), (63, 8, 47, 55),
        (3, 0, 3, 3), (8, 0, 8, 8), (256, 32, 192, 224),
    ],
)  # fmt: skip
async def test_what_groups_may_have(size, kept, together, single):
    """Hang what may: whoever has other groups gets a slot, as long as there is more than one."""
    crowd = Crowd(Slots(size, kept=kept))
    for number in range(size + 1):
        await crowd.come(f"one{number}", groups=("a", "x"))
    assert crowd.slots.running == together
    for number in range(size + 1):
        await crowd.come(f"other{number}", groups=("a", f"y{number}"))
    assert crowd.slots.running == single
    await crowd.come("stranger", groups=("c", "z"))
    assert ("stranger" in crowd.order) == (single < size)
    order = await crowd.all()
    assert len(order) == 2 * size + 3


async def test_the_urgent_have_a_share_of_all_slots():
    crowd = Crowd(Slots(8, reserved=1, kept=1))
    for number in range(8):
        await crowd.come(f"a{number}", groups=("a", "x"))
    assert crowd.slots.running == 5
    for number in range(8):
        await crowd.come(f"d{number}", rank=URGENT, groups=("a", "x"))
    assert crowd.slots.running == 6
    for name in ("b", "d"):
        await crowd.come(name, rank=URGENT if name == "d" else 1, groups=(name, "y"))
    assert crowd.order[-2:] == ["b", "d"]
    await crowd.all()


async def test_an_empty_group_is_nobody():
    crowd = Crowd(Slots(8, kept=1))
    for number in range(8):
        await crowd.come(f"a{number}", groups=("", ""))
    assert crowd.slots.running == 8
    await crowd.all()
    crowd = Crowd(Slots(8, kept=1))
    for number in range(9):
        await crowd.come(f"b{number}", groups=(f"ns{number}", ""))
    assert crowd.slots.running == 8
    await crowd.all()


async def test_a_wait_in_vain_tells_of_the_share():
    crowd = Crowd(Slots(8, kept=1))
    for number in range(6):
        await crowd.come(f"a{number}", groups=("a", "x"))
    waiting = [await crowd.come("late", timeout=0.05, groups=("a", "x"))]
    [result] = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(result, NoSlotError)
    assert (result.waiting, result.share) == (1, 6)
    crowd.tasks.pop()
    await crowd.all()


async def test_nothing_is_remembered_of_groups_that_are_gone():
    crowd = Crowd(Slots(2, kept=1))
    for number in range(20):
        await crowd.come(f"c{number}", groups=(f"ns{number % 3}", f"net{number % 4}"))
    late = await crowd.come("late", timeout=0.01, groups=("never", "had"))
    await asyncio.gather(late, return_exceptions=True)
    crowd.tasks.remove(late)
    await crowd.all()
    assert (crowd.slots._held, crowd.slots._lines, crowd.slots._behind) == ({}, {}, {})
