"""Elect the primary configuration, make `00-multus.conf` from it, and keep that in the runtime's directory."""
