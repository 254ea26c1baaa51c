"""`multusctl` asks the daemon of a node, and acts on the node."""

from multus_daemon.tools.ctl.commands import main

__all__ = ["main"]
