"""`multusctl plugins`: which plugins there are on this node."""

from __future__ import annotations

import argparse

from multus_daemon.tools.ctl.commands import common


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    meaning = "show which plugins there are on this node, and who serves them"
    common.command(groups, "plugins", meaning, run, daemon=False)


def run(arguments: argparse.Namespace) -> int:
    """Raises SettingsError, CommandError."""
    from multus_daemon.diagnosis import plugins

    settings = common.settings_of(arguments)
    try:
        found = plugins.of(settings)
    except OSError as error:
        raise common.CommandError(
            f"binDir {settings.paths.bin_dir} can't be listed: {error.strerror or error}"
        ) from error
    if arguments.json:
        common.print_json(found)
    else:
        from multus_daemon.tools.ctl import show_plugins

        show_plugins.plugins(found)
    return common.FAILED if any(item["problem"] for item in found["plugins"]) else common.DONE
