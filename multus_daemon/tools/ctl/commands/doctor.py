"""`multusctl doctor`: what is wrong with this node, and how it is mended."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from multus_daemon.tools.ctl.client import NoDaemonError
from multus_daemon.tools.ctl.commands import common

if TYPE_CHECKING:
    from multus_daemon.diagnosis import doctor

LEASES = "/var/lib/cni/networks"
"""host-local's directories where a network names no other."""


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    meaning = "look for what is wrong with this node; exit status 1 where there is an error"
    parser = common.command(groups, "doctor", meaning, run)
    parser.add_argument(
        "--fix", action="store_true", help="mend what can be mended without harm, and say what was done"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises SettingsError, CommandError."""
    from multus_daemon.diagnosis import doctor
    from multus_daemon.tools.ctl import offline

    settings = common.settings_of(arguments)
    client = common.client(arguments)

    def answers() -> tuple[str, dict[str, str]]:
        try:
            return "", client.ask("status")["gates"]
        except NoDaemonError as error:
            return str(error), {}

    node = doctor.Node(
        settings,
        offline.store(Path(settings.paths.cni_dir)),
        offline.vanished,
        answers,
        tool=lambda command: offline.output_of(settings.paths.chroot_dir, command),
        lease_dirs=offline.present(settings.paths.chroot_dir, (LEASES,)),
    )
    findings = doctor.examine(node)
    if arguments.fix:
        findings = _fixed(node, findings)
    if arguments.json:
        common.print_json(doctor.to_object(findings))
    else:
        from multus_daemon.tools.ctl import show_doctor

        show_doctor.findings(doctor.to_object(findings))
    return common.FAILED if any(item.severity == "error" for item in findings) else common.DONE


def _fixed(node: doctor.Node, findings: list[doctor.Finding]) -> list[doctor.Finding]:
    """What is left once everything that is safe was done. Raises CommandError."""
    from multus_daemon.diagnosis import doctor

    for item in findings:
        if item.fix is not None:
            try:
                item.fix()
            except OSError as error:
                raise common.CommandError(f"{item.subject}: {item.fix_is}: {error.strerror or error}") from error
            sys.stderr.write(f"multusctl: {item.subject}: {item.fix_is}: done\n")
    return doctor.examine(node)
