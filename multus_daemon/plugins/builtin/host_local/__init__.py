"""The IPAM plugin `host-local`."""
