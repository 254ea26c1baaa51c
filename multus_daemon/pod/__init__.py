"""The networks of one pod: gather, plan, add, delete, check, hot-plug, the record, and what is announced."""
