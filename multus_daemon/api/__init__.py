"""HTTP: the unix socket for the shim and hot-plug, the admin paths, health, the metrics port, the webhook."""
