"""Deadlines and time budgets of the programs, in seconds. `tests/unit/test_deadlines.py` asserts the relations."""

from __future__ import annotations

# --- `multusctl`, `kubectl multus` -----------------------------------------------------------------------------------
CTL_DAEMON_SECONDS = 2.0
"""`multusctl` waits this long for a listening daemon, then says how to start one."""
CTL_SHIM_SECONDS = 300.0
"""Limit for one call of the shim by `multusctl`. Above the shim's own waits, so that `multusctl` reads its error."""
CTL_SECONDS = 5.0
"""`multusctl` waits this long for an answer that needs no work, then reports that there is no daemon."""
CTL_PROGRAM_SECONDS = 2.0
"""`multusctl` waits this long for the output of a program of the host, then continues without it."""
CTL_VERSION_SECONDS = 0.9
"""Limit for `--version` of each runtime and of the shim, so that all fit into their part of the bundle (5 s)."""
CTL_BUNDLE_STATUS_SECONDS = 3.0
"""`multusctl bundle` waits this long for the status, else does not ask the daemon more. Far below CTL_BUNDLE_SECONDS.
"""
CTL_BUNDLE_SECONDS = 12.0
"""Limit for collecting of `multusctl bundle`; it names the parts that are missing then. Below KUBECTL_NODE_SECONDS."""
KUBECTL_NODE_SECONDS = 15.0
"""`kubectl multus` waits this long for one node, counted from the node's turn; the default of `--timeout`."""
KUBECTL_BUNDLE_SECONDS = 300.0
"""Limit for `kubectl multus bundle`; it names nodes that were not asked in time. Far above KUBECTL_NODE_SECONDS."""

# --- the webhook -----------------------------------------------------------------------------------------------------
WEBHOOK_REVIEW_SECONDS = 4.0
"""Limit for one review, including its body and its turn. Below the manifests' `timeoutSeconds`."""
WEBHOOK_SECONDS = 8.0
"""Lifetime of one connection to the webhook. Above WEBHOOK_REVIEW_SECONDS."""
WEBHOOK_HANDSHAKE_SECONDS = 1.0
"""Limit for the TLS handshake of a connection to the webhook, before the connection's lifetime begins."""
WEBHOOK_WARNINGS_SECONDS = 0.25
"""Limit for finding warnings about a pod or workload. Several times below WEBHOOK_REVIEW_SECONDS."""
WEBHOOK_LOOKUP_SECONDS = 2.0
"""Limit for looking up the networks of a pod to which the webhook adds requests. Below WEBHOOK_REVIEW_SECONDS."""
