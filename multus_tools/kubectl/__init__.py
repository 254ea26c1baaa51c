"""`kubectl multus`: questions about Multus in a whole cluster, with the user's kubeconfig.

Pods, networks, nodes and Events are read from the API server. What only a node knows is asked of its daemon, by running
`multusctl … --json` in the daemon's pod (`pod_exec`).
"""

from multus_tools.kubectl.commands import complete, main

__all__ = ["complete", "main"]
