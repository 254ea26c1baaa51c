"""`multusctl validate`: what is wrong in manifests and configurations, before they are applied."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from multus_daemon.tools.ctl.commands import common

STDIN: Final = "-"
FORMATS: Final = ("text", "json", "github")
_SUFFIXES: Final = frozenset({".yaml", ".yml", ".json", ".conf", ".conflist"})
"""Files of a directory that are read."""


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    meaning = "look for what is wrong in manifests and configurations; exit status 1 where there is an error"
    parser = common.command(groups, "validate", meaning, run, daemon=False)
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="NetworkAttachmentDefinitions, pods, workloads, ConfigMaps, CNI configurations, the daemon's; as YAML or "
        "JSON; a directory: all such files below it; -: standard input",
    )
    parser.add_argument("--strict", action="store_true", help="exit status 1 for a warning, too")
    parser.add_argument("--format", choices=FORMATS, default="text", help="github: annotations of a workflow's log")
    parser.add_argument(
        "--bin-dir",
        metavar="DIR",
        action="append",
        default=[],
        help="plugin binaries are here: one that is not, and not built in, is an error; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises CommandError, SettingsError."""
    from multus_daemon.diagnosis import validate

    files = list(_read(dict.fromkeys(arguments.files)))
    report = validate.of(files, settings=common.settings_of(arguments), bin_dirs=arguments.bin_dir)
    if arguments.json or arguments.format == "json":
        common.print_json(report.to_object())
    else:
        from multus_daemon.tools.ctl import show_validate

        if arguments.format == "github":
            show_validate.github(report)
        else:
            show_validate.findings(report, dict(files))
    return common.FAILED if report.count("error") or (arguments.strict and report.findings) else common.DONE


def _read(names: Sequence[str] | dict[str, None]) -> Iterator[tuple[str, bytes]]:
    """Raises CommandError."""
    from multus_daemon.diagnosis.validate.source import FILE_MAX_BYTES

    for name in names:
        try:
            if name == STDIN:
                yield name, sys.stdin.buffer.read(FILE_MAX_BYTES + 1)
                continue
            path = Path(name)
            below = sorted(item for item in path.rglob("*") if item.suffix in _SUFFIXES and item.is_file())
            for item in below if path.is_dir() else [path]:
                with item.open("rb") as file:
                    yield str(item), file.read(FILE_MAX_BYTES + 1)
        except OSError as error:
            raise common.CommandError(f"{name} can't be read: {error.strerror or error}") from error
