"""The commands of `multusctl`, one module for each: `add_to` declares it, `run` does it and gives the exit status.

A module imports at its top what the command line needs; what takes time to load (rich, the kernel, the store) is
imported by `run`, so that every command answers at once.
"""

from __future__ import annotations

from multus_daemon.tools.ctl.commands import (
    attachments,
    completion,
    doctor,
    explain,
    graph,
    plugins,
    sandbox,
    status,
    trace,
    validate,
)

COMMANDS = (status, attachments, explain, trace, graph, plugins, validate, doctor, sandbox, completion)
"""In the order of `--help`."""
