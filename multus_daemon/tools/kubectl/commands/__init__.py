"""The commands of `kubectl multus`, one module for each: `add_to` declares it, `run` does it and gives the exit status.

As with `multusctl`, a module imports at its top what the command line needs; what takes time to load (the API client,
rich) is imported by `run`.
"""

from __future__ import annotations

from multus_daemon.tools.kubectl.commands import leaks, networks, pods, status, why

COMMANDS = (status, pods, why, networks, leaks)
"""In the order of `--help`."""
