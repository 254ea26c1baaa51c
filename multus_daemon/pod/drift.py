"""Drift: differences between a container's attachments and their records, and what is done about each.

The record says how it was, the kernel how it is (`ListRunner.differences`). `keep` says what follows: a repair, a
report, or nothing. The pod's annotation counts before that of the network, and that before the node's setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from multus_daemon import deadlines
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.plugin import Difference
from multus_daemon.pod.engine import Engine
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Pod
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad.following import Keep, keep_of
from multus_daemon.spec.ports import NetworkNotFoundError, StoreUnavailableError


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing of an attachment that differs from its record."""

    attachment: Attachment
    difference: Difference
    keep: Keep

    @property
    def is_repaired(self) -> bool:
        """True if it is to be brought back, and can be."""
        return self.keep == "repair" and self.difference.repair is not None

    def __str__(self) -> str:
        return f"network {self.attachment.name}: {self.difference.text}"


def findings(
    engine: Engine, record: ContainerRecord, pod: Pod | None, netns: PodNetns, *, also_off: bool = False
) -> list[Finding]:
    """Compare each attachment of the container with its record. Changes nothing; blocks, in the thread of `netns`.

    `pod`: None if it is not known. `also_off`: compare what `keep` says is left alone, too. The caller holds the
    container's lock. Raises InvalidNetnsError if the namespace cannot be entered.
    """
    found: list[Finding] = []
    for attachment in record.attachments:
        keep = _keep(engine, pod, attachment)
        if keep == "off" and not also_off:
            continue
        found += [Finding(attachment, item, keep) for item in _differences(engine, record, attachment, netns)]
    return found


def _differences(
    engine: Engine, record: ContainerRecord, attachment: Attachment, netns: PodNetns
) -> Sequence[Difference]:
    try:
        with deadline.within(deadlines.COMPARE_SECONDS):
            return engine.runner.differences(record.sandbox, attachment, netns)
    except deadline.ExpiredError:
        return [Difference(f"not compared within {deadlines.COMPARE_SECONDS:g} s", is_certain=False)]
    except CniError as error:
        if not netns.exists:
            raise
        return [Difference(f"can't be compared: {error}", is_certain=False)]


def _keep(engine: Engine, pod: Pod | None, attachment: Attachment) -> Keep:
    default = engine.policy.keep
    of_network = {}
    namespace, slash, name = attachment.name.partition("/")
    if slash:
        try:
            of_network = dict(engine.cluster.network(namespace, name).annotations)
        except (NetworkNotFoundError, StoreUnavailableError):
            # What the network said is not known any more.
            pass
    return keep_of(pod.annotations if pod else {}, of_network, default)
