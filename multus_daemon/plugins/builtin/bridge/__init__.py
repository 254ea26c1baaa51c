"""The plugin `bridge`."""
