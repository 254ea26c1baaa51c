"""`multusctl`: questions to the daemon of this node, checks of the node, and repairs."""

from multus_tools.ctl.commands import main

__all__ = ["main"]
