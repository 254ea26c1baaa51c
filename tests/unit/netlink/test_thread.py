import asyncio
import threading

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
