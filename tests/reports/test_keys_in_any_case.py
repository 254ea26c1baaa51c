"""Configurations of the first releases have `LogLevel` and `LogFile` with capitals: keys match in any case, and so
does the level.

k8snetworkplumbingwg/multus-cni#211; kind: configurations of the daemon.
"""

import pytest

from multus_daemon import settings


@pytest.mark.parametrize("level", ["debug", "DEBUG", "Debug"])
def test_log_level_and_file(level: str) -> None:
    found = settings.parse(f'{{"LogLevel": "{level}", "LogFile": "/var/log/multus.log"}}'.encode(), "test")
    assert (found.logs.level, found.logs.file) == ("debug", "/var/log/multus.log")
