"""Programs beside the daemon: `multusctl`, `kubectl multus`, `multus-builtin`, the approver and the webhook.

The daemon imports nothing of this package.
"""
