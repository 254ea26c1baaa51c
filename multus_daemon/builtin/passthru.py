"""`passthru`: does nothing and says so; the first plugin of the auxiliary chain (upstream's `cmd/passthru-cni`)."""

from __future__ import annotations

from multus_daemon.builtin.contract import Call
from multus_daemon.cni.result import Result


class Passthru:
    """The plugin. It gives what is chained behind it a prevResult: an empty one, whatever it gets itself."""

    def unsupported(self, call: Call) -> str:
        """Nothing is asked of it that it could fail to do."""
        return ""

    async def add(self, call: Call) -> Result:
        """An empty result."""
        return Result()

    async def delete(self, call: Call) -> None:
        """Nothing has been made."""

    async def check(self, call: Call) -> None:
        """Nothing can be missing."""

    async def status(self, call: Call) -> None:
        """Always ready."""
