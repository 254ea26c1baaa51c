"""DEL for every network of a container: from the record alone, past every error, as often as it takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from multus_daemon.cni.errors import CniError, InternalError, IoFailureError, from_code
from multus_daemon.cni.names import ContainerId
from multus_daemon.ports import ContainerRecord, CorruptRecordError, DelegateRunner, DelegateStore, Sandbox

log = logging.getLogger(__name__)


class Detacher:
    """Detaches the networks of one container. The caller holds the container's lock."""

    def __init__(self, runner: DelegateRunner, store: DelegateStore) -> None:
        self._runner = runner
        self._store = store

    def load(self, container_id: ContainerId) -> ContainerRecord | None:
        """The container's record. Raises IoFailureError (5) where it can't be read: nothing may be lost then."""
        try:
            return self._store.load(container_id)
        except CorruptRecordError as error:
            raise IoFailureError(
                f"record of container {container_id} is damaged: {error}",
                "what it held must be freed by hand; remove the file then",
            ) from error
        except OSError as error:
            raise IoFailureError(f"record of container {container_id} can't be read: {error}") from error

    async def detach(self, record: ContainerRecord, netns: str) -> None:
        """Run DEL for each attachment in reverse, in the namespace `netns` (empty: it is gone).

        One failure does not stop the others. The record goes when all succeeded, else it stays for the next try.
        Raises CniError: the first failure with its code, the others in the details.
        """
        sandbox = Sandbox(record.sandbox.container_id, netns)
        failures: list[CniError] = []
        for attachment in reversed(record.attachments):
            try:
                await self._runner.delete(sandbox, attachment)
            except CniError as error:
                failures.append(error.with_context(f"pod {record.pod}"))
            except Exception as error:
                log.exception("DEL of network %s of pod %s", attachment.name, record.pod)
                failures.append(
                    InternalError(f"{type(error).__name__}: {error} (network {attachment.name} of pod {record.pod})")
                )
        if failures:
            raise _joined(failures)
        try:
            self._store.remove(record.sandbox.container_id)
        except OSError as error:
            raise IoFailureError(
                f"record of container {record.sandbox.container_id} can't be removed: {error}"
            ) from error

    async def detach_leftover(self, record: ContainerRecord) -> None:
        """Undo what an ADD that never finished left behind, in the namespace it was in. Raises CniError."""
        log.warning(
            "container %s of pod %s has an unfinished or outdated record: undone first",
            record.sandbox.container_id,
            record.pod,
        )
        await self.detach(replace(record, complete=False), record.sandbox.netns)


def _joined(failures: Sequence[CniError]) -> CniError:
    first, *others = failures
    if not others:
        return first
    details = " / ".join([*([first.details] if first.details else []), *map(str, others)])
    return from_code(first.code, first.msg, details)
