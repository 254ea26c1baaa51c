"""`multusctl` asks the daemon of a node, and acts on the node."""

from multus_tools.ctl.commands import main

__all__ = ["main"]
