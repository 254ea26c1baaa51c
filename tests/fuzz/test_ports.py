"""A short run of `tests.fuzz.ports`; `python -m tests.fuzz ports` is the long one."""

from __future__ import annotations

import random

from tests.fuzz import ports


async def test_no_request_to_a_port_keeps_the_loop_for_long() -> None:
    seed = random.randrange(1_000_000)
    count, longest = await ports.fuzz(5, seed)
    assert count > 20, seed
    assert longest < ports.LONGEST_SECONDS, seed
