"""What is no failure when a link is removed."""

from __future__ import annotations

import errno
import os

import pytest

from multus_daemon.plugins.builtin import interfaces


@pytest.mark.parametrize(("number", "is_done"), [(errno.ENODEV, True), (errno.EBUSY, False), (errno.EPERM, False)])
def test_only_a_link_that_is_absent_counts_as_removed(number: int, is_done: bool) -> None:
    def remove() -> None:
        with interfaces.absent_is_done():
            raise OSError(number, os.strerror(number))

    if is_done:
        remove()
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            remove()
