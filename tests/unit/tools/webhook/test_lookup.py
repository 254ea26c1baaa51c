"""The look-up of networks for the resource injector."""

from __future__ import annotations

from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import NetworkNotFoundError
from multus_tools.webhook import server


async def test_networks_that_the_watch_lacks_are_asked_for_but_not_too_many() -> None:
    asked = []

    async def look_up(namespace: str, name: str) -> NetworkAttachmentDefinition:
        asked.append(name)
        if name == "new-00":
            return NetworkAttachmentDefinition(namespace, name)
        raise NetworkNotFoundError(name)

    known = {("a", "old"): NetworkAttachmentDefinition("a", "old")}
    keys = {("a", "old"), *(("a", f"new-{number:02}") for number in range(50))}
    found = await server._find(known, look_up, keys)  # type: ignore[arg-type]
    assert found.keys() == {("a", "old"), ("a", "new-00")}
    assert len(asked) == server.LOOKUPS_MAX
