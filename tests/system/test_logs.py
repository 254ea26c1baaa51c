"""The log file on a full disk and on one that is read-only."""

import logging
import re
from logging.handlers import RotatingFileHandler

import pytest

from multus_daemon import logs
from tests.disks import fill, make_read_only, make_writable

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"

pytestmark = pytest.mark.usefixtures("logging_as_found")


def test_a_full_disk_costs_lines_and_the_file_says_how_many(small_disk, capsys):
    path = small_disk / "multus.log"
    logs.configure(file=str(path), to_stderr=False)
    logger = logging.getLogger("multus_daemon")
    logger.info("before")
    filler = fill(small_disk)
    # What is left of the last page takes some of it.
    for _ in range(3):
        logger.info("lost %s", "x" * 6000)
    said = capsys.readouterr().err
    assert re.fullmatch(rf"{STAMP} \[error\] log file {path}: No space left on device; lines are lost .*\n", said)
    filler.unlink()
    logger.info("after")
    before, part, missing, after = path.read_text().splitlines()
    assert before.endswith(" before")
    assert " lost x" in part
    assert re.fullmatch(rf"{STAMP} \[warning\] 3 lines are missing here, they could not be written", missing)
    assert after.endswith(" after")
    assert capsys.readouterr().err == ""


def test_a_full_disk_at_the_time_of_rotation(small_disk, capsys):
    """The file is closed then, and writing to a closed one would fail for ever."""
    path = small_disk / "multus.log"
    logs.configure(file=str(path), to_stderr=False, options={"maxSize": 0, "maxBackups": 1})
    [handler] = logging.getLogger().handlers
    assert isinstance(handler, RotatingFileHandler)
    handler.maxBytes = 10_000
    logger = logging.getLogger("multus_daemon")
    logger.info("x" * 6000)
    filler = fill(small_disk)
    for _ in range(5):
        logger.info("x" * 6000)
    filler.unlink()
    for _ in range(4):
        logger.info("y" * 6000)
    assert path.read_text().rstrip().endswith("y")
    assert (small_disk / "multus.log.1").stat().st_size <= 10_000
    capsys.readouterr()


def test_a_read_only_disk(small_disk, capsys):
    path = small_disk / "multus.log"
    logs.configure(file=str(path), to_stderr=False, options={"maxSize": 0, "maxBackups": 1})
    [handler] = logging.getLogger().handlers
    assert isinstance(handler, RotatingFileHandler)
    logger = logging.getLogger("multus_daemon")
    logger.info("before")
    handler.maxBytes = 10
    handler.close()
    make_read_only(small_disk)
    logger.info("lost")
    logger.info("lost")
    assert capsys.readouterr().err.count("Read-only file system") == 1
    make_writable(small_disk)
    logger.info("after")
    assert path.read_text().rstrip().endswith(" after")
