"""The end of root tasks: every failure is told once."""

import asyncio

import pytest

from multus_daemon.runtime import tasks


async def test_the_first_failure_is_raised_and_the_others_are_logged(caplog):
    async def fail(text):
        raise ValueError(text)

    running = [asyncio.create_task(fail(name), name=name) for name in ("one", "two")]
    running.append(asyncio.create_task(asyncio.sleep(60), name="sleeps"))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="one") as caught:
        await tasks.end(running)
    # The program's last line shows it, with its traceback.
    assert caught.value.__notes__ == ["root task one"]
    [record] = caplog.records
    assert record.getMessage() == "ValueError: two (root task two)"
    assert record.exc_info
    assert running[2].cancelled()


async def test_tasks_that_are_cancelled_have_not_failed(caplog):
    running = [asyncio.create_task(asyncio.sleep(60), name="sleeps")]
    await tasks.end(running)
    assert caplog.records == []
