"""`multus-daemon webhook`: the admission webhooks of the cluster, and their rules."""
