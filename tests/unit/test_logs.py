import asyncio
import errno
import logging
import re
import stat
import threading
from logging.handlers import RotatingFileHandler

import pytest

from multus_daemon import logs
from multus_daemon.logs import LineFormatter

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"

pytestmark = pytest.mark.usefixtures("logging_as_found")


def line(message, *args, level=logging.INFO, **extra):
    record = logging.LogRecord("multus_daemon.x", level, "f.py", 1, message, args, extra.get("exc_info"))
    return LineFormatter().format(record)


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


@pytest.mark.parametrize("breaker", ["\n", "\r", "\x0b", "\x85", "\u2028", "\u2029", "\x1b", "\x00", "\ud800"])
def test_a_message_cannot_begin_a_line_of_its_own(breaker):
    text = line("bad name %s", f"a{breaker}2026-01-01T00:00:00Z [error] forged")
    assert len(text.splitlines()) == 1
    assert text.isprintable()
    assert "forged" in text


def test_a_traceback_follows_indented():
    try:
        raise ValueError("first\n2026-01-01T00:00:00Z [error] forged")
    except ValueError as error:
        text = line("failed", exc_info=(type(error), error, error.__traceback__))
    first, *rest = text.splitlines()
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
    assert logs.flush()
    assert re.findall(r"\[(\w+)\]", capfd.readouterr().err) == shown


def test_other_packages_are_heard_from_warnings_on(capfd):
    logs.configure("debug")
    logging.getLogger("aiohttp").info("chatter")
    logging.getLogger("aiohttp").warning("trouble")
    assert logs.flush()
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
    logs.configure("verbose", to_stderr=False, file=str(path), options={"maxSize": 1, "maxBackups": 2, "maxAge": 3})
    logger = logging.getLogger("multus_daemon")
    for _ in range(120):
        logger.info("x" * 30_000)
    assert logs.flush()
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
    assert logs.flush()
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
        (None, (100, 5)),
        ({}, (100, 5)),
        ({"maxSize": 7}, (7, 5)),
        ({"maxBackups": 0, "maxAge": 3, "compress": True}, (100, 0)),
    ],
)
def test_what_no_option_says_has_its_default(tmp_path, options, limits):
    logs.configure(file=str(tmp_path / "x.log"), to_stderr=False, options=options)
    [handler] = logging.getLogger().handlers
    assert isinstance(handler, logs.QueueHandler)
    assert isinstance(handler.sink, RotatingFileHandler)
    assert (handler.sink.maxBytes // 1024 // 1024, handler.sink.backupCount) == limits


@pytest.mark.conformance("programs-13")
def test_an_old_log_is_continued(tmp_path):
    path = tmp_path / "multus.log"
    path.write_text("old\n")
    logs.configure(file=str(path), to_stderr=False)
    logging.getLogger("multus_daemon").info("new")
    assert logs.flush()
    assert re.fullmatch(rf"old\n{STAMP} \[verbose\] new\n", path.read_text())


@pytest.mark.conformance("programs-17")
def test_configuring_again_replaces_and_closes(tmp_path, capfd):
    logs.configure(file=str(tmp_path / "a.log"), to_stderr=True)
    first, _ = (item.sink for item in logging.getLogger().handlers if isinstance(item, logs.QueueHandler))
    assert isinstance(first, RotatingFileHandler)
    logs.configure(file=str(tmp_path / "b.log"), to_stderr=True)
    assert first.stream is None
    logging.getLogger("multus_daemon").info("once")
    assert logs.flush()
    assert capfd.readouterr().err.count("once") == 1
    assert (tmp_path / "a.log").read_text() == ""


@pytest.mark.conformance("programs-16")
def test_an_unknown_level_changes_nothing():
    logs.configure("error")
    with pytest.raises(ValueError, match="log level 'loud': one of panic, error, verbose, debug is needed"):
        logs.configure("loud")
    assert logging.getLogger("multus_daemon").level == logging.ERROR


@pytest.mark.conformance("programs-14")
def test_a_file_that_cannot_be_opened_changes_nothing(tmp_path):
    logs.configure("error")
    before = logging.getLogger().handlers[:]
    with pytest.raises(OSError, match="No such file"):
        logs.configure(file=str(tmp_path / "missing" / "x.log"))
    assert logging.getLogger().handlers == before


def test_a_standard_error_that_fails_for_a_while_loses_lines_and_says_so(capfd, monkeypatch):
    logs.configure(to_stderr=True)
    log = logging.getLogger("multus_daemon")
    [handler] = (item for item in logging.getLogger().handlers if isinstance(item, logs.QueueHandler))
    written = handler.sink.write

    def fail(line):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(handler.sink, "write", fail)
    log.info("first")
    log.info("second")
    assert logs.flush()
    monkeypatch.setattr(handler.sink, "write", written)
    log.info("third")
    assert logs.flush()
    notice, third = capfd.readouterr().err.splitlines()
    assert " 2 " in notice
    assert third.endswith("third")


def test_what_comes_from_outside_is_cut():
    text = line("refused: %s", "x" * 10_000_000)
    assert len(text) < 40_000
    assert text.endswith("xxx... (10000009 characters)")
    with logs.fields(network="n" * 10_000_000):
        assert len(line("x")) < 40_000
