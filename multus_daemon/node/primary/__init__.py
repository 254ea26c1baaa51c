"""Elect the primary network's CNI configuration, wrap it, and keep the result in place."""
