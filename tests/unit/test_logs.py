import asyncio
import contextlib
import errno
import gzip
import json
import logging
import os
import re
import shutil
import stat
import threading
import time

import pytest

from multus_daemon import logs
from multus_daemon.logs import FORMATS
from multus_daemon.logs.sinks import QueueHandler, RotatingFile
from tests.aside import logged
from tests.waiting import until

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"

pytestmark = pytest.mark.usefixtures("logging_as_found")


def line(message, *args, level=logging.INFO, line_format="text", **extra):
    record = logging.LogRecord("multus_daemon.x", level, "f.py", 1, message, args, extra.get("exc_info"))
    return FORMATS[line_format]().format(record)


def file_of():
    """Where the lines of the one queue there is go."""
    [handler] = logging.getLogger().handlers
    assert isinstance(handler, QueueHandler)
    assert isinstance(handler.sink, RotatingFile)
    return handler.sink


def failure():
    """An exception whose text forges a line."""
    try:
        raise ValueError("first\n2026-01-01T00:00:00Z [error] forged")
    except ValueError as error:
        return type(error), error, error.__traceback__


@pytest.mark.conformance("programs-18")
@pytest.mark.parametrize(
    ("level", "name"),
    [
        (logging.CRITICAL, "panic"),
        (logging.ERROR, "error"),
        (logging.WARNING, "warning"),
        (logging.INFO, "verbose"),
        (logging.DEBUG, "debug"),
    ],
)
def test_a_line(level, name):
    with logs.fields(pod="web/web-1", container="c0ffee"):
        text = line("attached %d networks", 2, level=level)
    assert re.fullmatch(STAMP + rf" \[{name}\] attached 2 networks pod=web/web-1 container=c0ffee", text)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("plain/word-1.2", "plain/word-1.2"),
        (7, "7"),
        (0, "0"),
        ("two words", '"two words"'),
        ('a"b', '"a\\"b"'),
        ("a=b", '"a=b"'),
        ("a\nb", '"a\\nb"'),
        ("\u2028\x1b[31m\x7f", '"\\u2028\\u001b[31m\\u007f"'),
        ("a\\nb", '"a\\\\nb"'),
        ("é", "é"),
    ],
)
def test_values_are_quoted(value, written):
    with logs.fields(key=value):
        assert line("x").endswith(f" x key={written}")


def test_numbers_and_the_items_of_a_mapping():
    with logs.fields(seconds=0.25, code=7, stages={"plugin": 1.23456}):
        assert line("x").endswith(" x seconds=0.250 code=7 stages_plugin=1.235")


@pytest.mark.parametrize("breaker", ["\n", "\r", "\x0b", "\x85", "\u2028", "\u2029", "\x1b", "\x00", "\ud800"])
def test_a_message_cannot_begin_a_line_of_its_own(breaker):
    text = line("bad name %s", f"a{breaker}2026-01-01T00:00:00Z [error] forged")
    assert len(text.splitlines()) == 1
    assert text.isprintable()
    assert "forged" in text


def test_a_traceback_follows_indented():
    first, *rest = line("failed", exc_info=failure()).splitlines()
    assert first.endswith("[verbose] failed")
    assert any("ValueError: first" in part for part in rest)
    assert all(part.startswith("    ") for part in rest)


def test_fields_nest_and_end():
    with logs.fields(a="1", b="2"):
        with logs.fields(b="3", c="", d=None):
            assert line("x").endswith(" x a=1 b=3")
        assert line("x").endswith(" x a=1 b=2")
    assert line("x").endswith(" x")


async def test_fields_belong_to_the_task():
    async def work(name):
        with logs.fields(task=name):
            await asyncio.sleep(0)
            inner = asyncio.create_task(asyncio.sleep(0, line("inner")))
            return line("x"), await inner

    results = await asyncio.gather(work("a"), work("b"))
    for name, (own, inner) in zip("ab", results, strict=True):
        assert own.endswith(f" x task={name}")
        assert inner.endswith(f" inner task={name}")


@pytest.mark.conformance("programs-12", "programs-15")
@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("panic", ["panic"]),
        ("error", ["error", "panic"]),
        ("verbose", ["verbose", "warning", "error", "panic"]),
        ("debug", ["debug", "verbose", "warning", "error", "panic"]),
        ("DEBUG", ["debug", "verbose", "warning", "error", "panic"]),
    ],
)
def test_levels(capfd, level, shown):
    logs.configure(level)
    logger = logging.getLogger("multus_daemon.pod")
    for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        logger.log(number, "x")
    assert logged()
    assert re.findall(r"\[(\w+)\]", capfd.readouterr().err) == shown


def test_other_packages_are_heard_from_warnings_on(capfd):
    logs.configure("debug")
    logging.getLogger("aiohttp").info("chatter")
    logging.getLogger("aiohttp").warning("trouble")
    assert logged()
    shown = capfd.readouterr().err
    assert "trouble" in shown
    assert "chatter" not in shown


@pytest.mark.conformance("programs-17")
def test_nothing_is_shown_where_nothing_is_wanted(capfd):
    logs.configure("debug", to_stderr=False)
    logging.getLogger("multus_daemon").error("x")
    assert capfd.readouterr() == ("", "")


@pytest.mark.conformance("programs-13", "programs-20")
def test_the_file_is_private_and_rotates(tmp_path, capfd):
    path = tmp_path / "multus.log"
    logs.configure(
        "verbose", to_stderr=False, file=str(path), options={"maxSize": 1, "maxBackups": 2, "compress": False}
    )
    logger = logging.getLogger("multus_daemon")
    for _ in range(120):
        logger.info("x" * 30_000)
    assert logged()
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["multus.log", "multus.log.1", "multus.log.2"]
    for name in names:
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        assert (tmp_path / name).stat().st_size <= 1024 * 1024
    assert capfd.readouterr().err == ""


@pytest.mark.weak_spot(44)
def test_lines_of_many_threads_stay_whole(tmp_path):
    """Upstream writes each line in three parts, without a lock."""
    path = tmp_path / "multus.log"
    logs.configure(file=str(path), to_stderr=False)
    logger = logging.getLogger("multus_daemon")

    def work(number):
        for count in range(200):
            with logs.fields(thread=number):
                logger.info("%s line %d", "x" * number * 100, count)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert logged()
    lines = path.read_text().splitlines()
    assert len(lines) == 8 * 200
    for text in lines:
        match = re.fullmatch(rf"{STAMP} \[verbose\] (x*) line \d+ thread=(\d)", text)
        assert match, text[:200]
        assert len(match[1]) == int(match[2]) * 100


@pytest.mark.conformance("programs-20")
@pytest.mark.parametrize(
    ("options", "limits"),
    [
        (None, (100, 5, 5, True)),
        ({}, (100, 5, 5, True)),
        ({"maxSize": 7}, (7, 5, 5, True)),
        ({"maxBackups": 0, "maxAge": 3, "compress": False}, (0, 0, 3, False)),
    ],
)
def test_what_no_option_says_has_its_default(tmp_path, options, limits):
    logs.configure(file=str(tmp_path / "x.log"), to_stderr=False, options=options)
    file = file_of()
    assert (file.maxBytes // 1024 // 1024, file.backupCount, file.days, file.compresses) == limits


def test_a_line_in_json():
    values = {"pod": "web/web-1", "seconds": 0.25, "code": 7, "stages": {"plugin": 1.23456}, "odd": 'a "b" = c\n\x7f'}
    with logs.fields(**values):
        text = line("attached %d networks", 2, line_format="json")
    assert len(text.splitlines()) == 1
    assert text.isascii()
    assert text.isprintable()
    found = json.loads(text)
    assert re.fullmatch(STAMP, found.pop("time"))
    plain = {"pod": "web/web-1", "seconds": 0.25, "code": 7, "stages": {"plugin": 1.235}, "odd": values["odd"]}
    assert found == {"level": "verbose", "msg": "attached 2 networks", **plain}


def test_a_traceback_is_a_field():
    text = line("failed", line_format="json", exc_info=failure())
    assert len(text.splitlines()) == 1
    trace = json.loads(text)["traceback"]
    assert trace.startswith("Traceback (most recent call last):\n")
    assert "ValueError: first" in trace


@pytest.mark.parametrize("line_format", ["json", "text"])
def test_what_comes_from_outside_is_cut_in_every_format(line_format):
    with logs.fields(network="n" * 10_000_000):
        assert len(line("%s", "x" * 10_000_000, line_format=line_format)) < 80_000


def test_an_unknown_format_changes_nothing():
    logs.configure("error")
    with pytest.raises(ValueError, match="log format 'xml' is none of text, json"):
        logs.configure(line_format="xml")
    assert logging.getLogger("multus_daemon").level == logging.ERROR


def test_the_note_of_missing_lines_has_the_format_too(capfd, monkeypatch):
    logs.configure(line_format="json")
    [handler] = (item for item in logging.getLogger().handlers if isinstance(item, QueueHandler))
    written = handler.sink.write

    def fail(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(handler.sink, "write", fail)
    logging.getLogger("multus_daemon").info("lost")
    assert logged()
    monkeypatch.setattr(handler.sink, "write", written)
    with logs.fields(pod="web/web-1"):
        logging.getLogger("multus_daemon").info("seen")
    assert logged()
    notice, seen = map(json.loads, capfd.readouterr().err.splitlines())
    assert (notice["level"], notice["msg"][:9], "pod" in notice) == ("warning", "1 lines a", False)
    assert (seen["msg"], seen["pod"]) == ("seen", "web/web-1")


# --- old files -------------------------------------------------------------------------------------------------------


def names(directory):
    return sorted(entry.name for entry in directory.iterdir())


@pytest.mark.conformance("programs-20")
def test_old_files_are_compressed_and_nothing_is_lost(tmp_path):
    path = tmp_path / "multus.log"
    logs.configure("verbose", to_stderr=False, file=str(path), options={"maxSize": 1, "maxBackups": 3})
    logger = logging.getLogger("multus_daemon")
    for number in range(110):
        logger.info("%d %s", number, "x" * 30_000)
    assert logged()
    until(lambda: names(tmp_path) == ["multus.log", *(f"multus.log.{number}.gz" for number in (1, 2, 3))])
    for number in (1, 2, 3):
        assert stat.S_IMODE((tmp_path / f"multus.log.{number}.gz").stat().st_mode) == 0o600
    texts = [gzip.decompress((tmp_path / f"multus.log.{number}.gz").read_bytes()) for number in (3, 2, 1)]
    lines = b"".join([*texts, path.read_bytes()]).splitlines()
    assert [int(line.split()[2]) for line in lines] == list(range(110))


def rotating(path, **options):
    return RotatingFile(str(path), **{"max_bytes": 0, "backups": 3, "days": 0, "compress": True} | options)


def hold(monkeypatch, name):
    """Let a function of `shutil` wait, and return what it waits for."""
    go, real = threading.Event(), getattr(shutil, name)

    def held(*arguments):
        assert go.wait(20)
        return real(*arguments)

    monkeypatch.setattr(shutil, name, held)
    return go


def test_lines_do_not_wait_for_a_file_that_is_compressed(tmp_path, monkeypatch):
    (tmp_path / "multus.log.1").write_bytes(b"old\n")
    go = hold(monkeypatch, "copyfileobj")
    file = rotating(tmp_path / "multus.log")
    file.write("in between\n")
    assert (tmp_path / "multus.log").read_text() == "in between\n"
    assert "multus.log.1" in names(tmp_path)
    go.set()
    until(lambda: names(tmp_path) == ["multus.log", "multus.log.1.gz"])
    file.close()


def test_what_a_crash_has_left_is_compressed_at_the_next_start(tmp_path):
    data = os.urandom(1024 * 1024)
    (tmp_path / "x.log.1").write_bytes(data)
    (tmp_path / "x.log.1.gz.tmp").write_bytes(b"of a crash" * 1000)
    os.utime(tmp_path / "x.log.1", (1_700_000_000, 1_700_000_000))
    rotating(tmp_path / "x.log").close()
    until(lambda: names(tmp_path) == ["x.log", "x.log.1.gz"])
    assert gzip.decompress((tmp_path / "x.log.1.gz").read_bytes()) == data
    assert (tmp_path / "x.log.1.gz").stat().st_mtime == 1_700_000_000


def test_a_rotation_in_the_middle_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "x.log"
    path.write_bytes(b"new\n")
    (tmp_path / "x.log.1").write_bytes(b"old\n" * 200_000)
    go = hold(monkeypatch, "copyfileobj")
    file = rotating(path, max_bytes=10)
    rotation = threading.Thread(target=file.write, args=("a line of 10\n",))
    rotation.start()
    time.sleep(0.05)
    assert path.read_bytes() == b"new\n"
    go.set()
    rotation.join()
    until(lambda: names(tmp_path) == ["x.log", "x.log.1.gz", "x.log.2.gz"])
    assert gzip.decompress((tmp_path / "x.log.1.gz").read_bytes()) == b"new\n"
    assert gzip.decompress((tmp_path / "x.log.2.gz").read_bytes()) == b"old\n" * 200_000
    assert path.read_bytes() == b"a line of 10\n"
    file.close()


def test_two_daemons_do_not_compress_the_same_file(tmp_path, monkeypatch):
    (tmp_path / "x.log.1").write_bytes(b"old\n" * 200_000)
    go = hold(monkeypatch, "copyfileobj")
    first = rotating(tmp_path / "x.log")
    until(lambda: "x.log.1.gz.tmp" in names(tmp_path))
    rotating(tmp_path / "x.log").close()
    until(lambda: sum(thread.name == "log gzip" for thread in threading.enumerate()) == 1)
    assert names(tmp_path) == ["x.log", "x.log.1", "x.log.1.gz.tmp"]
    go.set()
    until(lambda: names(tmp_path) == ["x.log", "x.log.1.gz"])
    assert gzip.decompress((tmp_path / "x.log.1.gz").read_bytes()) == b"old\n" * 200_000
    first.close()


def test_files_that_are_too_old_are_removed(tmp_path):
    path = tmp_path / "x.log"
    for name, days in {"x.log.1": 1, "x.log.2.gz": 4, "x.log.3.gz": 6, "x.log.4": 9, "x.log.bak": 99}.items():
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (time.time() - days * 86400,) * 2)
    rotating(path, backups=5, compress=False).close()
    assert len(names(tmp_path)) == 6
    rotating(path, backups=5, days=5, compress=False).close()
    assert names(tmp_path) == ["x.log", "x.log.1", "x.log.2.gz", "x.log.bak"]


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "x.log.1").write_bytes(os.urandom(1024 * 1024))
    tried = []

    def full(*_):
        tried.append(True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    rotating(tmp_path / "x.log").close()
    until(lambda: tried and names(tmp_path) == ["x.log", "x.log.1"])


def test_a_file_that_another_program_has_renamed_is_opened_anew(tmp_path):
    """Such as the shim, which writes to the same file."""
    path = tmp_path / "multus.log"
    logs.configure(file=str(path), to_stderr=False, options={"compress": False})
    logging.getLogger("multus_daemon").info("first")
    assert logged()
    path.rename(tmp_path / "multus.log.1")
    logging.getLogger("multus_daemon").info("second")
    assert logged()
    assert path.read_text().endswith(" second\n")
    assert (tmp_path / "multus.log.1").read_text().endswith(" first\n")
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    logging.getLogger("multus_daemon").info("third")
    assert logged()
    assert path.read_text().endswith(" third\n")


@pytest.mark.conformance("programs-13")
def test_an_old_log_is_continued(tmp_path):
    path = tmp_path / "multus.log"
    path.write_text("old\n")
    logs.configure(file=str(path), to_stderr=False)
    logging.getLogger("multus_daemon").info("new")
    assert logged()
    assert re.fullmatch(rf"old\n{STAMP} \[verbose\] new\n", path.read_text())


@pytest.mark.conformance("programs-17")
def test_configuring_again_replaces_and_closes(tmp_path, capfd):
    logs.configure(file=str(tmp_path / "a.log"), to_stderr=True)
    descriptors = len(os.listdir("/proc/self/fd"))
    logs.configure(file=str(tmp_path / "b.log"), to_stderr=True)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    logging.getLogger("multus_daemon").info("once")
    assert logged()
    assert capfd.readouterr().err.count("once") == 1
    assert (tmp_path / "a.log").read_text() == ""


@pytest.mark.conformance("programs-16")
def test_an_unknown_level_changes_nothing():
    logs.configure("error")
    with pytest.raises(ValueError, match="log level 'loud' is none of panic, error, verbose, debug"):
        logs.configure("loud")
    assert logging.getLogger("multus_daemon").level == logging.ERROR


@pytest.mark.conformance("programs-14")
def test_a_fifo_is_written_if_somebody_reads_it(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
        rotating(path, max_bytes=10)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        file = rotating(path, max_bytes=10)
        file.write("a line that is longer\n")
        assert os.read(reader, 100) == b"a line that is longer\n"
        file.close()
    finally:
        os.close(reader)


def test_a_file_that_cannot_be_opened_changes_nothing(tmp_path):
    logs.configure("error")
    before = logging.getLogger().handlers[:]
    with pytest.raises(OSError, match="No such file"):
        logs.configure(file=str(tmp_path / "missing" / "x.log"))
    assert logging.getLogger().handlers == before


def test_a_standard_error_that_fails_for_a_while_loses_lines_and_says_so(capfd, monkeypatch):
    logs.configure(to_stderr=True)
    log = logging.getLogger("multus_daemon")
    [handler] = (item for item in logging.getLogger().handlers if isinstance(item, QueueHandler))
    written = handler.sink.write

    def fail(line):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(handler.sink, "write", fail)
    log.info("first")
    log.info("second")
    assert logged()
    monkeypatch.setattr(handler.sink, "write", written)
    log.info("third")
    assert logged()
    notice, third = capfd.readouterr().err.splitlines()
    assert " 2 " in notice
    assert third.endswith("third")
