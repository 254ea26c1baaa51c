"""Count the addresses in all namespaces of a node, as the kernel has them: none may be in two."""

from __future__ import annotations

import json
import subprocess
from typing import Final

from tests.e2e.node import Node
from tests.programs import needed
from tests.soak.disturbance import Repeated

EVERY_SECONDS: Final = 0.3
TWICE_MAX: Final = 20
"""Lines after which no more are noted."""


class Census(Repeated):
    """A context manager that reads the addresses three times a second in its block."""

    def __init__(self, node: Node) -> None:
        super().__init__("census", (EVERY_SECONDS, EVERY_SECONDS))
        self._node = node
        self.looks = 0
        self.most = 0
        """Number of addresses in the fullest look."""
        self.twice: list[str] = []
        """A line for each address that was in two namespaces."""

    @property
    def summary(self) -> str:
        return f"{self.looks} looks at up to {self.most} addresses"

    def work(self) -> None:
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
