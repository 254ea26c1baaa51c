"""Say what `node.keep` has found of a container: log lines, Events, and the pod's condition."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from multus_daemon import deadlines
from multus_daemon.node.containers import REPAIRS_MAX, Container
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.upkeep import Compared, Finding
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.nad.following import KEEP_ANNOTATION
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, Events

log = logging.getLogger(__name__)

BROKEN: Final = "AttachmentBroken"
REPAIRED: Final = "AttachmentRepaired"
CHANGED: Final = "AttachmentChanged"
READY: Final = "NetworksAttached"
CHANGE_FAILED: Final = "NetworkChangeFailed"


def announce(engine: Engine, events: Events, container: Container, result: Compared, now: float) -> bool:
    """Note in `container` what was found, and announce what is new; return whether anything is.

    `now`: on the event loop's clock.
    """
    record, pod = result.record, result.pod
    # What only a plugin's CHECK says is for who asks: `multusctl drift`.
    certain = [item for item in result.left if item.difference.is_certain and not item.difference.by_pod]
    left = _texts(certain)
    has_news = left != container.broken
    for (network, ifname), text in _texts(result.found).items():
        is_repaired = any(item.is_repaired and item.attachment.ifname == ifname for item in result.found)
        if is_repaired and (network, ifname) not in left:
            container.repaired(ifname, now)
            has_news = True
            _say(events, pod, "Normal", REPAIRED, f"network {network}, interface {ifname}: repaired: {text}")
    for (network, ifname), text in left.items():
        if container.broken.get((network, ifname)) != text:
            log.warning("network %s of pod %s differs from its record: %s", network, record.pod, text)
            advice = _advice(container, [item for item in certain if item.attachment.ifname == ifname], now)
            _say(events, pod, "Warning", BROKEN, f"network {network}, interface {ifname}: {text}; {advice}")
    container.broken = left
    by_pod = _texts(item for item in result.left if item.difference.by_pod)
    for network, ifname in container.to_report(by_pod, now):
        text = by_pod[network, ifname]
        log.info("network %s of pod %s: %s", network, record.pod, text)
        _say(events, pod, "Normal", CHANGED, f"network {network}, interface {ifname}: {text}; reported once")
    if result.error is not None:
        log.warning("networks of pod %s: %s", record.pod, result.error)
    if pod is not None and engine.policy.ready_condition:
        _write_condition(engine, pod, result.error, certain)
    return has_news


def _texts(found: Iterable[Finding]) -> dict[tuple[str, IfName], str]:
    """Return what differs, by network and interface."""
    texts: dict[tuple[str, IfName], list[str]] = {}
    for item in found:
        texts.setdefault((item.attachment.name, item.attachment.ifname), []).append(item.difference.text)
    return {key: ", ".join(values) for key, values in texts.items()}


def _advice(container: Container, left: list[Finding], now: float) -> str:
    if not any(item.difference.repair for item in left):
        return "only a new pod has it again"
    if not any(item.is_repaired for item in left):
        return f"set {KEEP_ANNOTATION} to repair on the pod or the network, or make the pod anew"
    if not all(container.may_repair(item.attachment.ifname, now) for item in left):
        minutes = deadlines.KEEP_CALM_SECONDS / 60
        return f"it was repaired {REPAIRS_MAX} times in {minutes:g} minutes: find out who changes it"
    return "the repair is tried again"


def _write_condition(engine: Engine, pod: Pod, error: CniError | None, left: Sequence[Finding]) -> None:
    if error is not None:
        reason, message = CHANGE_FAILED, str(error)
    elif left:
        reason, message = BROKEN, "; ".join(map(str, left))
    else:
        reason, message = READY, ""
    engine.cluster.condition(pod, ready=reason == READY, reason=reason, message=message[:EVENT_MESSAGE_MAX])


def _say(events: Events, pod: Pod | None, kind: str, reason: str, message: str) -> None:
    if pod is not None:
        events.event(pod, kind, reason, message[:EVENT_MESSAGE_MAX])
