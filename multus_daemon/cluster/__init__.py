"""Pods, networks and devices of this node as the cluster declares them; writing of network-statuses and Events."""
