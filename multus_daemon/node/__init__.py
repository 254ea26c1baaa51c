"""The whole node: GC, STATUS, the spool, reconciliation, network-statuses at start, the primary configuration."""
