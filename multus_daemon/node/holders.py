"""What the node knows of the containers that hold addresses of the cluster. All of it blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from multus_daemon.kernel import everywhere
from multus_daemon.pod.engine import Engine
from multus_daemon.spec.addresses import Address, Owner, Reservation
from multus_daemon.spec.cni.names import ContainerId, Namespace, PodName, PodUid
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, PodNotFoundError, StoreUnavailableError

log = logging.getLogger(__name__)

TAKEN: Final = "AddressTaken"


class Holders:
    """Answers about owners from the records, the kernel and the pods."""

    def __init__(self, engine: Engine, look: Callable[[str], None]) -> None:
        """`look` has the containers of a pod (`namespace/name`) compared soon."""
        self._engine = engine
        self._look = look

    def has(self, owner: Owner) -> bool | None:
        """Return True if the record has the owner's attachment, as from before its ADD; None if it is unreadable.

        Raises OSError.
        """
        container_id = ContainerId(owner.container_id)
        found = self._engine.records.read([container_id])
        record = found.get(container_id)
        if record is None and container_id in {*found, *self._engine.records.view.unreadable}:
            return None
        return record is not None and any(it.ifname == owner.ifname and not it.detached for it in record.attachments)

    def is_set_aside(self, owner: Owner) -> bool:
        """Return True if the container's networks were given up. Raises OSError."""
        return any(item.container_id == owner.container_id for item in self._engine.records.store.aside())

    def has_address(self, address: Address) -> bool:
        """Return True if a network namespace of the node has, or may have, the address. Raises OSError."""
        return everywhere.has_address(address)

    def report(self, mine: Reservation, other: Reservation) -> None:
        """Report at both pods that they have the same address."""
        for one, two in ((mine, other), (other, mine)):
            where = f" on node {two.node}" if two.node else ""
            text = f"{one.address} of interface {one.owner.ifname} is also held by pod {two.podref}{where}"
            self._event(one.podref, f"{text}; delete one of the two pods")
        self._look(mine.podref)

    def _event(self, podref: str, text: str) -> None:
        namespace, _, name = podref.partition("/")
        try:
            pod = self._engine.cluster.pod(Namespace(namespace), PodName(name), PodUid(""))
        except (PodNotFoundError, StoreUnavailableError) as error:
            log.warning("%s (pod %s: %s)", text, podref, error)
            return
        self._engine.cluster.event(pod, "Warning", TAKEN, text[:EVENT_MESSAGE_MAX])
