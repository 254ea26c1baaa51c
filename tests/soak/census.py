"""Count the addresses in all namespaces of a node, as the kernel has them: none may be in two."""

from __future__ import annotations

import json
import subprocess
import threading
from types import TracebackType
from typing import Final, Self

from tests.e2e.node import Node
from tests.programs import needed

EVERY_SECONDS: Final = 0.3
TWICE_MAX: Final = 20
"""Lines after which no more are noted."""


class Census:
    """A context manager that reads the addresses three times a second in its block."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="census")
        self._error: BaseException | None = None
        self.looks = 0
        self.most = 0
        """Number of addresses in the fullest look."""
        self.twice: list[str] = []
        """A line for each address that was in two namespaces."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self._ending.set()
        self._thread.join()
        if self._error and kind is None:
            raise self._error

    @property
    def summary(self) -> str:
        return f"{self.looks} looks at up to {self.most} addresses"

    def _work(self) -> None:
        try:
            while not self._ending.wait(EVERY_SECONDS):
                self.look()
        except BaseException as error:
            self._error = error

    def look(self) -> None:
        """Read all namespaces, one after the other. An address that moves meanwhile is not in two."""
        owners: dict[str, str] = {}
        for name in self._node.netns_names():
            for address in _addresses(name):
                owner = owners.setdefault(address, name)
                # The first still has it after the second was seen to have it.
                if owner != name and address in _addresses(owner) and len(self.twice) < TWICE_MAX:
                    self.twice.append(f"address {address} is in {owner} and in {name}")
                owners[address] = name
        self.looks += 1
        self.most = max(self.most, len(owners))


def _addresses(name: str) -> set[str]:
    """Return the addresses of a namespace; none if it is gone. Those of a link are in many."""
    command = [needed("ip"), "-n", name, "-j", "address", "show", "scope", "global"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode or not done.stdout.strip():
        return set()
    # `ip` writes empty objects for what it leaves out.
    items = [item for link in json.loads(done.stdout) for item in link.get("addr_info", ())]
    return {item["local"] for item in items if item}
