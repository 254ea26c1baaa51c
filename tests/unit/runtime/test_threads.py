import contextlib
import contextvars
import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import pytest

from multus_daemon.runtime import deadline, threads
from multus_daemon.runtime.deadline import ExpiredError, Interrupted
from tests.aside import Aside, together
from tests.waiting import PATIENCE, until


@pytest.fixture
def field() -> Iterator[contextvars.ContextVar[str]]:
    field: contextvars.ContextVar[str] = contextvars.ContextVar("field")
    token = field.set("seen")
    yield field
    field.reset(token)


# --- start -----------------------------------------------------------------------------------------------------------


def test_work_in_a_thread_returns_its_result_and_sees_the_context(field: contextvars.ContextVar[str]) -> None:
    def work() -> tuple[str, str, bool]:
        thread = threading.current_thread()
        return field.get(), thread.name, thread is threading.main_thread()

    assert threads.start(work, name="ADD c1").result(PATIENCE) == ("seen", "ADD c1", False)


def test_a_thread_has_the_deadline_of_who_started_it() -> None:
    limit = deadline.Deadline()
    with deadline.given(limit):
        assert threads.start(deadline.current).result(PATIENCE) is limit


@pytest.mark.parametrize("error", [ZeroDivisionError("no"), Interrupted(), SystemExit(1)])
def test_what_a_thread_raises_is_raised(error: BaseException) -> None:
    def work() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        threads.start(work).result(PATIENCE)
    assert raised.value is error


def test_each_piece_of_work_has_a_thread_of_its_own_that_ends_with_it() -> None:
    """One that has entered a network namespace must not do anybody else's work."""
    seen = [threads.start(threading.current_thread).result(PATIENCE) for _ in range(5)]
    assert len({id(thread) for thread in seen}) == 5
    until(lambda: not any(thread.is_alive() for thread in seen))


def test_a_thread_does_not_keep_the_program_from_ending() -> None:
    assert threads.start(lambda: threading.current_thread().daemon).result(PATIENCE)


@pytest.mark.parametrize("fails", [False, True])
def test_who_waits_for_a_thread_may_give_up(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of work that was given up goes nowhere."""
    escaped: list[object] = []
    monkeypatch.setattr(threading, "excepthook", escaped.append)
    gate = threading.Event()

    def work() -> threading.Thread:
        running.append(threading.current_thread())
        gate.wait(PATIENCE)
        if fails:
            raise ZeroDivisionError
        return threading.current_thread()

    running: list[threading.Thread] = []
    done = threads.start(work)
    until(lambda: running)
    assert done.cancel()
    gate.set()
    running[0].join(PATIENCE)
    assert not running[0].is_alive()
    assert escaped == []


# --- KeyedLock -------------------------------------------------------------------------------------------------------


class Crowd:
    """Threads that come to a lock one after another, and the order in which they got it."""

    def __init__(self, locks: threads.KeyedLock) -> None:
        self.locks = locks
        self.log: list[str] = []
        self.inside: set[str] = set()
        self._leave: dict[str, threading.Event] = {}

    def come(self, name: str, key: str = "a") -> Aside[None]:
        """Ask for the lock; returns when the thread waits or has it."""
        self._leave[name] = threading.Event()

        def work() -> None:
            with self.locks.hold(key):
                self.log.append(name)
                self.inside.add(name)
                try:
                    end = time.monotonic() + PATIENCE
                    while not self._leave[name].is_set():
                        assert time.monotonic() < end
                        deadline.pause(0.002)
                finally:
                    self.inside.discard(name)

        before = self._waiting(key)
        aside = Aside(work)
        until(lambda: name in self.log or self._waiting(key) > before)
        return aside

    def leave(self, *names: str) -> None:
        """Let those out who are in, and those who come in later."""
        for name in names:
            self._leave[name].set()

    def _waiting(self, key: str) -> int:
        return len(self.locks._waiting.get(key, ()))


@pytest.fixture(params=["of a process", "shared"])
def crowd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Crowd]:
    locks = threads.KeyedLock() if request.param == "of a process" else threads.SharedKeyedLock(tmp_path / "locks")
    crowd = Crowd(locks)
    yield crowd
    crowd.leave(*crowd._leave)


def test_one_at_a_time_within_a_key_in_the_order_of_arrival(crowd: Crowd) -> None:
    names = [str(number) for number in range(5)]
    comers = [crowd.come(name) for name in names]
    for name, comer in zip(names, comers, strict=True):
        until(lambda name=name: crowd.log[-1:] == [name])  # type: ignore[misc]  # a default of a lambda
        assert crowd.inside == {name}
        crowd.leave(name)
        comer.result()
    assert crowd.log == names
    assert len(crowd.locks.keys) == 0


def test_a_late_comer_does_not_overtake_one_who_waits() -> None:
    """A released lock goes to the first waiter, even if that thread has not woken up yet."""
    locks, log = threads.KeyedLock(), []

    def work(name: str) -> None:
        with locks.hold("a"):
            log.append(name)

    with locks.hold("a"):
        waiting = Aside(work, "first")
        until(lambda: locks._waiting["a"])
    with locks.hold("a"):
        log.append("second")
    waiting.result()
    assert log == ["first", "second"]


def test_keys_do_not_wait_for_each_other(crowd: Crowd) -> None:
    one, other = crowd.come("one", "a"), crowd.come("other", "b")
    assert crowd.inside == {"one", "other"}
    assert len(crowd.locks.keys) == 2
    assert crowd.locks.keys == {"a", "b"}
    crowd.leave("one", "other")
    one.result()
    other.result()
    assert len(crowd.locks.keys) == 0
    assert crowd.locks.keys == frozenset()


@pytest.mark.parametrize("stopped", ["holder", "waiter", "both"])
def test_an_interruption_frees_the_key_and_lets_the_next_in(crowd: Crowd, stopped: str) -> None:
    holder, waiter = crowd.come("holder"), crowd.come("waiter")
    chosen = {"holder": [holder], "waiter": [waiter], "both": [waiter, holder]}[stopped]
    for aside in chosen:
        aside.stop()
    for aside in chosen:
        with pytest.raises(Interrupted):
            aside.result()
    if stopped == "holder":
        until(lambda: crowd.inside == {"waiter"})
    assert len(crowd.locks.keys) == (0 if stopped == "both" else 1)
    crowd.leave("holder", "waiter")
    for aside in {holder, waiter} - set(chosen):
        aside.result()
    assert len(crowd.locks.keys) == 0
    with crowd.locks.hold("a"):
        assert len(crowd.locks.keys) == 1


def test_one_who_gives_up_in_the_middle_of_the_line_leaves_the_order_of_the_others(crowd: Crowd) -> None:
    comers = {name: crowd.come(name) for name in ("1", "2", "3", "4")}
    comers["3"].stop()
    with pytest.raises(Interrupted):
        comers.pop("3").result()
    crowd.leave("1", "2", "4")
    for comer in comers.values():
        comer.result()
    assert crowd.log == ["1", "2", "4"]
    assert len(crowd.locks.keys) == 0


def test_a_wait_for_a_lock_ends_with_the_time(crowd: Crowd) -> None:
    crowd.come("holder")
    with pytest.raises(ExpiredError), deadline.within(0.02), crowd.locks.hold("a"):
        pytest.fail("somebody else holds it")
    assert crowd.inside == {"holder"}
    assert crowd.locks._waiting["a"] == type(crowd.locks._waiting["a"])()


def test_a_free_lock_is_had_without_a_wait_also_when_the_time_is_over() -> None:
    with deadline.within(0), threads.KeyedLock().hold("a"):
        pass


def test_a_waiter_interrupted_just_as_the_lock_becomes_free_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that leaves on its turn passes the lock to the next waiter; otherwise the lock would be lost."""
    locks, log = threads.KeyedLock(), []
    interrupted = threading.Event()
    may_go_on = threading.Event()

    class Late(deadline.Deadline):
        """Its wait ends with an interruption that arrives when the event has come too."""

        def wait(self, *events: futures.Future[object]) -> None:
            interrupted.set()
            assert may_go_on.wait(PATIENCE)
            assert all(event.done() for event in events)
            raise Interrupted

    def unlucky() -> None:
        with deadline.given(Late()), locks.hold("a"):
            log.append("unlucky")

    def lucky() -> None:
        with locks.hold("a"):
            log.append("next")

    with locks.hold("a"):
        first = Aside(unlucky)
        assert interrupted.wait(PATIENCE)
        second = Aside(lucky)
        until(lambda: len(locks._waiting["a"]) == 2)
    may_go_on.set()
    with pytest.raises(Interrupted):
        first.result()
    second.result()
    assert log == ["next"]
    assert len(locks.keys) == 0


def test_interruptions_under_load_lose_no_lock() -> None:
    locks, inside = threads.KeyedLock(), 0

    def work() -> None:
        nonlocal inside
        for _ in range(40):
            with contextlib.suppress(ExpiredError), deadline.within(0.0005), locks.hold("a"):
                inside += 1
                assert inside == 1
                time.sleep(0.0003)
                inside -= 1

    together(*(work for _ in range(6)))
    assert len(locks.keys) == 0


def test_who_has_a_shared_key_has_it_for_all_with_the_file(tmp_path: Path) -> None:
    # Two that have opened the file are to the kernel what two processes are.
    mine, theirs = (threads.SharedKeyedLock(tmp_path / "locks") for _ in range(2))
    for _ in range(3):
        with mine.hold("a"):
            with theirs.hold("b"), pytest.raises(ExpiredError), deadline.within(0.05), theirs.hold("a"):
                pytest.fail("somebody else has it")
            assert len(theirs.keys) == 0
        with deadline.within(0), theirs.hold("a"):
            pass


def test_a_shared_key_comes_when_the_other_process_gives_it_back(tmp_path: Path) -> None:
    mine, theirs = (threads.SharedKeyedLock(tmp_path / "locks") for _ in range(2))
    log: list[str] = []

    def wait() -> None:
        with theirs.hold("a"):
            log.append("theirs")

    with mine.hold("a"):
        waiter = Aside(wait)
        time.sleep(0.05)
        log.append("mine")
    waiter.result()
    assert log == ["mine", "theirs"]


def test_without_the_file_the_keys_are_the_process_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "locks").symlink_to(tmp_path / "elsewhere")
    locks = threads.SharedKeyedLock(tmp_path / "locks")
    for _ in range(2):
        with locks.hold("a"), pytest.raises(ExpiredError), deadline.within(0.01), locks.hold("a"):
            pytest.fail("it is held")
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"{tmp_path / 'locks'} can't be locked, another process may do the same work"
    ]
    assert not (tmp_path / "elsewhere").exists()


# --- Reads -----------------------------------------------------------------------------------------------------------


class Hanging:
    """A disk that answers when it is told to; each answer is another one."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.begun = 0

    def read(self) -> int:
        self.begun += 1
        number = self.begun
        self.answers.wait(PATIENCE)
        return number


@pytest.fixture
def disk() -> Iterator[Hanging]:
    disk = Hanging()
    yield disk
    disk.answers.set()


def test_a_read_returns_what_it_found_or_raises_and_sees_the_context(field: contextvars.ContextVar[str]) -> None:
    def work(first: int, *, second: int) -> tuple[int, str, bool]:
        return first + second, field.get(), threading.current_thread() is threading.main_thread()

    reads = threads.Reads(PATIENCE)
    assert reads.of("a", work, 1, second=2) == (3, "seen", False)
    with pytest.raises(ZeroDivisionError):
        reads.of("a", lambda: 1 // 0)
    assert reads.of("a", lambda: "again") == "again"


def test_the_wait_for_a_read_that_hangs_ends_and_others_do_not_notice(disk: Hanging) -> None:
    # The other read has the same time, which has to do on a busy machine.
    reads = threads.Reads(1)
    with pytest.raises(TimeoutError, match=r"\[Errno 110\] the disk did not answer within 1 s") as raised:
        reads.of("a", disk.read)
    assert not isinstance(raised.value, ExpiredError), "an OSError of the disk and no deadline of the caller's"
    assert reads.of("b", lambda: "done") == "done"


def test_an_error_of_time_that_the_disk_itself_has_is_its_own() -> None:
    def fail() -> None:
        raise TimeoutError(110, "of NFS")

    with pytest.raises(TimeoutError, match="of NFS"):
        threads.Reads(PATIENCE).of("a", fail)


def test_a_read_that_hangs_takes_one_thread_however_often_it_is_asked_for(disk: Hanging) -> None:
    reads = threads.Reads(0.02)
    for _ in range(5):
        with pytest.raises(TimeoutError):
            reads.of("a", disk.read)
    assert disk.begun == 1


def test_who_comes_after_a_read_that_hung_reads_anew(disk: Hanging) -> None:
    """A read that began long ago may return the state before a write."""
    reads = threads.Reads(PATIENCE)
    first = Aside(reads.of, "a", disk.read)
    until(lambda: disk.begun)
    first.stop()
    with pytest.raises(Interrupted):
        first.result()
    second = Aside(reads.of, "a", disk.read)
    time.sleep(0.01)
    assert disk.begun == 1
    disk.answers.set()
    assert second.result() == 2


def test_reads_may_be_shared_while_they_run(disk: Hanging) -> None:
    reads = threads.Reads(PATIENCE, shared=True)
    first = Aside(reads.of, "a", disk.read)
    until(lambda: disk.begun)
    others = [Aside(reads.of, "a", disk.read) for _ in range(3)]
    until(lambda: len(reads._running["a"]._waiters) == 4)
    disk.answers.set()
    assert [aside.result() for aside in (first, *others)] == [1, 1, 1, 1]
    assert reads.of("a", disk.read) == 2


@pytest.mark.parametrize("ends", ["stopped", "expired"])
def test_a_read_that_hangs_is_interrupted_with_its_caller(disk: Hanging, ends: str) -> None:
    """It is the request that ends then; that is no fault of the disk."""
    aside = Aside(threads.Reads(60).of, "a", disk.read)
    until(lambda: disk.begun)
    if ends == "stopped":
        aside.stop()
        with pytest.raises(Interrupted):
            aside.result()
    else:
        with pytest.raises(ExpiredError), deadline.within(0.02):
            threads.Reads(60).of("a", disk.read)


def test_a_thread_that_can_not_be_started_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(threads.NoThreadError, match="can't start new thread") as caught:
        threads.start(lambda: None)
    assert caught.value.errno == errno.EAGAIN
    # Callers that do the work themselves in place of a thread expect it.
    assert isinstance(caught.value, RuntimeError)


def test_shared_reads_reuse_threads_that_end_when_there_are_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_IDLE_SECONDS", 0.05)
    reads = threads.Reads(PATIENCE, shared=True)
    found: set[threading.Thread] = set()
    for number in range(20):
        found.add(reads.of(number, threading.current_thread))
        # It waits for the next one a moment after its caller goes on.
        time.sleep(0.001)
    assert len(found) < 5
    until(lambda: not any(thread.is_alive() for thread in found))
    assert reads.of("a", lambda: "done") == "done"


def test_a_read_for_which_there_is_no_thread_is_no_read_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = threads.Reads(PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(threads, "start", _no_thread)
        with pytest.raises(RuntimeError, match="no thread"):
            reads.of("a", lambda: "never")
    assert reads.of("a", lambda: "done") == "done"


def _no_thread(work: Callable[[], object], *, name: str) -> futures.Future[object]:
    raise RuntimeError("no thread is to be had")
