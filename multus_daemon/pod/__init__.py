"""The networks of one pod: gather, plan, add, delete, check, hot-plug, its record, its network-status and Events."""
