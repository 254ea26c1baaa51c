"""Errors that are ignored when a link is removed."""

from __future__ import annotations

import errno
import os

import pytest

from multus_daemon.plugins.builtin import interfaces


@pytest.mark.parametrize(("number", "is_done"), [(errno.ENODEV, True), (errno.EBUSY, False), (errno.EPERM, False)])
def test_only_an_absent_link_is_ignored(number: int, is_done: bool) -> None:
    def remove() -> None:
        with interfaces.ignoring_absent_link():
            raise OSError(number, os.strerror(number))

    if is_done:
        remove()
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            remove()
