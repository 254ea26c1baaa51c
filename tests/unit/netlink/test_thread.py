import asyncio
import threading

import pytest

from multus_daemon.netlink import thread


async def test_no_more_threads_than_allowed(monkeypatch):
    monkeypatch.setattr(thread, "AT_ONCE", 3)
    lock = threading.Lock()
    goes_on = threading.Event()
    running = most = 0

    def work(_abandoned):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        goes_on.wait(10)
        with lock:
            running -= 1

    calls = [asyncio.create_task(thread.run(work, name="test")) for _ in range(10)]
    while most < 3:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    # One that waits for its place goes at once.
    calls[-1].cancel()
    await asyncio.wait(calls[-1:], timeout=5)
    assert calls[-1].cancelled()
    goes_on.set()
    await asyncio.gather(*calls[:-1])
    assert (running, most) == (0, 3)


async def test_pieces_of_work_have_one_thread_that_ends_with_the_block():
    async with thread.worker("test") as worker:
        first = await worker.run(lambda _abandoned: threading.current_thread())
        second = await worker.run(lambda _abandoned: threading.current_thread())
        assert first is second
        assert [found for found in threading.enumerate() if found.name == "test"] == [first]
        with pytest.raises(ValueError, match="no luck"):
            await worker.run(fail)
        assert await worker.run(lambda _abandoned: threading.current_thread()) is first
    first.join(10)
    assert not first.is_alive()


def fail(_abandoned):
    raise ValueError("no luck")


async def test_a_thread_between_two_pieces_takes_no_place(monkeypatch):
    monkeypatch.setattr(thread, "AT_ONCE", 1)
    async with thread.worker("test") as worker:
        await worker.run(lambda _abandoned: None)
        async with asyncio.timeout(10):
            assert await thread.run(lambda _abandoned: 1, name="other") == 1


async def test_a_cancelled_piece_ends_before_its_caller_goes_on():
    ended = []

    def work(abandoned):
        abandoned.wait(10)
        ended.append(abandoned.is_set())

    async with thread.worker("test") as worker:
        call = asyncio.create_task(worker.run(work))
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.wait([call])
        assert (call.cancelled(), ended) == (True, [True])
        # The event is of that piece alone.
        assert not await worker.run(lambda abandoned: abandoned.is_set())


async def test_a_block_without_work_starts_no_thread():
    before = set(threading.enumerate())
    async with thread.worker("test"):
        assert set(threading.enumerate()) <= before
