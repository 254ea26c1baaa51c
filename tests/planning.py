"""One attachment planned as an ADD plans it, with the programs that are there."""

from __future__ import annotations

from multus_daemon.plugins.run import ListRunner
from multus_daemon.spec.attachment import Attachment, Sandbox


def plan_one(runner: ListRunner, sandbox: Sandbox, attachment: Attachment) -> Attachment:
    """Return it with `served_by`. Raises CniError."""
    return runner.plan(sandbox, attachment, runner.programs((attachment.config,)))
