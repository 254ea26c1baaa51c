"""`kubectl multus` asks about Multus in a whole cluster, with the user's kubeconfig.

The API server knows pods, networks, nodes and Events. What only a node knows is asked of its daemon, by
`multusctl … --json` in the daemon's pod (`cluster.kube.pod_exec`).
"""

from multus_tools.kubectl.commands import complete, main

__all__ = ["complete", "main"]
