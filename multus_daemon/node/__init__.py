"""Tasks about all pods of the node: GC, upkeep, the spool, reconciling, the start, the primary configuration."""
