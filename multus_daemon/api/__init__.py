"""The HTTP edge: the unix socket for the shim, health, metrics. The only user of aiohttp."""
