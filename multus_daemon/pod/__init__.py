"""The verbs of CNI for all networks of one pod: resolve, attach, detach, check."""
