"""The parameters of a question to the daemon, and the type of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.spec.cni.errors import InvalidEnvironmentError

SHOWN: Final = 40
"""Maximum characters of a wrong value in an error."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The parameters of a question or an order."""

    query: Mapping[str, str]
    """Value of each key, the last one if it is repeated."""
    body: bytes = b""

    def flag(self, key: str) -> bool:
        """Return True if `key` is "true". Raises InvalidEnvironmentError for other values than "true" and "false"."""
        text = self.query.get(key, "")
        if text not in ("", "true", "false"):
            raise InvalidEnvironmentError(f"{key} is {text[:SHOWN]!r}: true or false is needed")
        return text == "true"

    def pod(self) -> str:
        """Return the key `pod`, `namespace/name`; empty if absent. Raises InvalidEnvironmentError."""
        text = self.query.get("pod", "")
        if text and (text.count("/") != 1 or not all(text.split("/"))):
            raise InvalidEnvironmentError(f"pod is {text[:SHOWN]!r}: NAMESPACE/POD is needed")
        return text

    def number(self, key: str, default: int, *, most: int) -> int:
        """Return the value of `key`, from 1 to `most`. Raises InvalidEnvironmentError."""
        text = self.query.get(key, "")
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
            raise InvalidEnvironmentError(f"{key} is {text[:SHOWN]!r}: a number from 1 to {most} is needed")
        return int(text)


Answer = Callable[[Asked], Mapping[str, Any]]
"""Returns the answer. Blocks, in a thread of its own. Raises CniError."""
ByMethod = Mapping[str, Mapping[str, Answer]]
"""Questions under GET and orders under POST, by name."""
