"""DEL for networks of a container: from the record alone, past every error, as often as it takes."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from multus_daemon import deadlines
from multus_daemon.kernel.ops import PodNetns
from multus_daemon.plugins.plugin import NeverAttachedError
from multus_daemon.pod import aside, devices, records, schedule
from multus_daemon.pod.engine import Engine
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni.errors import CniError, InternalError, TryAgainLaterError, from_code

log = logging.getLogger(__name__)

EVENT: Final = "NetworkNeverAttached"


def detach(
    engine: Engine,
    record: ContainerRecord,
    netns: PodNetns,
    *,
    seconds: float = deadlines.DETACH_SECONDS,
    counts: bool = False,
) -> None:
    """Run DEL for each attachment, in the namespace `netns` (empty path: it is gone), in the reverse order of the ADDs.

    Those that have nothing to do with each other run side by side, as theirs did (`pod.schedule`).

    One failure does not stop the others, nor does one that hangs: each may take its share of `seconds`, what the
    ones before it left included. The record goes when all succeeded; else it keeps what failed, for the next try.
    `counts`: as a try of the runtime's. Raises CniError: the first failure with its code, the others in the
    details.
    """
    torn = replace(record, complete=False, deletes_failed=record.deletes_failed + counts)
    detach_some(engine, torn, record.attachments, netns, seconds=seconds)


def detach_some(
    engine: Engine,
    record: ContainerRecord,
    leaving: Sequence[Attachment],
    netns: PodNetns,
    *,
    seconds: float = deadlines.DETACH_SECONDS,
) -> ContainerRecord | None:
    """As `detach`, for those that are `leaving`; the record of the others, as stored, None if there are none.

    A path at which the namespace is no longer that of the record, or no namespace, counts as one that is gone.

    What has been detached is on record as that also where others failed, or the call is interrupted.
    """
    backwards = leaving[::-1]
    before = schedule.backwards(schedule.predecessors(leaving))
    end = time.monotonic() + seconds
    begun = 0
    guard = threading.Lock()
    done: list[Attachment] = []
    failed: dict[int, CniError] = {}

    def delete_one(netns: PodNetns, number: int) -> None:
        nonlocal begun
        with guard:
            left = end - time.monotonic()
            share = max(0.0, left) / (len(backwards) - begun)
            begun += 1
        attachment = backwards[number]
        with netns.of_thread() as own:
            failure = delete(engine, record, attachment, own, share)
        if failure is None:
            done.append(attachment)
        else:
            failed[number] = failure

    here = [number for number, item in enumerate(backwards) if engine.runner.runs_here(item, "DEL")]
    # Links that built-ins have made: a binary may want to see its own, and one of that name may be somebody else's.
    links = [backwards[number].ifname for number in here if backwards[number].has_interface]
    try:
        with records.own_netns(engine, record, netns, links) as own:
            work = functools.partial(delete_one, own)
            schedule.in_order(work, before, at_once=engine.attach_concurrency, here=here)
    except Interrupted:
        with contextlib.suppress(CniError):
            records.without(engine, record, done)
        raise
    failures = [failed[number] for number in sorted(failed)]
    if failures and not record.failing_since:
        record = replace(record, failing_since=engine.clock())
    try:
        rest = records.without(engine, record, done)
    except CniError as error:
        raise joined([*failures, error]) from error
    if failures:
        raise joined(failures)
    return rest


def give_up(engine: Engine, record: ContainerRecord) -> None:
    """Put down that the runtime asks no more for what is still in the record. Raises IoFailureError (5)."""
    records.without(engine, replace(record, given_up=True), ())


def detach_leftover(engine: Engine, record: ContainerRecord, netns: PodNetns) -> tuple[Attachment, ...]:
    """Undo what an ADD that never finished, or lives no more, left behind, in the namespace it was in.

    What was added to the running container in the namespace `netns`, for which there will be an ADD now, stays: that
    is returned. Raises CniError.
    """
    log.warning(
        "container %s of pod %s has an unfinished or outdated record: undone first",
        record.sandbox.container_id,
        record.pod,
    )
    lives = record.sandbox.netns == netns.path and netns.exists and not netns.is_elsewhere(record.netns_id)
    leaving = [item for item in record.attachments if not (lives and item.hot_plugged and item.result)]
    rest = detach_some(engine, replace(record, complete=False), leaving, netns.at(record.sandbox.netns))
    return rest.attachments if rest else ()


def delete(
    engine: Engine, record: ContainerRecord, attachment: Attachment, netns: PodNetns, seconds: float
) -> CniError | None:
    """Run DEL for one attachment of the container that `record` is of; how it failed.

    What was never attached need not be detached: where there is no interface either, a refusal counts as done.
    """
    pod = record.pod
    sandbox = Sandbox(record.sandbox.container_id, netns.path)
    try:
        with deadline.within(seconds):
            engine.runner.delete(sandbox, attachment, netns)
            devices.remove(engine, attachment)
    except NeverAttachedError as error:
        if _may_have_interface(attachment, netns):
            return error.with_context(f"pod {pod}")
        _tell_never_attached(engine, record, attachment, error)
        devices.remove(engine, attachment)
    except CniError as error:
        return error.with_context(f"pod {pod}")
    except deadline.ExpiredError:
        return TryAgainLaterError(f"DEL of network {attachment.name} did not end within {seconds:.3g} s", f"pod {pod}")
    except Exception as error:
        return _fault(error, attachment, pod)
    return None


def _may_have_interface(attachment: Attachment, netns: PodNetns) -> bool:
    # An auxiliary chain works on the cluster network's interface.
    if attachment.auxiliary or not netns.path or not netns.exists:
        return False
    try:
        return bool(netns.existing([attachment.ifname]))
    except OSError:
        return netns.exists


def _tell_never_attached(engine: Engine, record: ContainerRecord, attachment: Attachment, error: CniError) -> None:
    text = (
        f"network {attachment.name}, interface {attachment.ifname!r}, was never attached, so that its DEL failed "
        f"counts as done: {error}"
    )
    log.warning("container %s of pod %s: %s", record.sandbox.container_id, record.pod, text)
    engine.count_never_attached()
    aside.tell(engine, record, EVENT, text)


def _fault(error: Exception, attachment: Attachment, pod: str) -> CniError:
    log.error("DEL of network %s of pod %s", attachment.name, pod, exc_info=error)
    return InternalError(f"{type(error).__name__}: {error} (network {attachment.name} of pod {pod})")


def joined(failures: Sequence[CniError]) -> CniError:
    """The first of `failures` with its code, the others in its details."""
    first, *others = failures
    if not others:
        return first
    details = " / ".join([*([first.details] if first.details else []), *map(str, others)])
    return from_code(first.code, first.msg, details)
