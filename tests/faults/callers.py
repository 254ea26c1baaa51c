"""A plugin of pytest that writes down which test files call which functions of the product, in their own process."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import pytest

from tests.faults.places import PRODUCT, ROOT

CALLS_FILE: Final = "MULTUS_TEST_CALLS"
"""Environment variable: the path of the file to write. JSON, test files by `<path>:<first line of the function>`."""
_callers: dict[str, dict[str, None]] = {}
_called: set[CodeType] = set()


def _note_call(frame: FrameType, event: str, _: object) -> None:
    if event == "call":
        _called.add(frame.f_code)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note the functions that a test and its fixtures call."""
    _called.clear()
    threading.setprofile(_note_call)
    sys.setprofile(_note_call)
    yield
    sys.setprofile(None)
    for code in _called.copy():
        if code.co_filename.startswith(f"{ROOT}/{PRODUCT}/"):
            function = f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno}"
            _callers.setdefault(function, {})[str(item.path.relative_to(ROOT))] = None


def pytest_sessionfinish() -> None:
    """Write what was noted."""
    Path(os.environ[CALLS_FILE]).write_text(json.dumps({name: list(files) for name, files in _callers.items()}))
