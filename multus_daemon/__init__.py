"""A drop-in replacement for the Multus thick plugin: the daemon that sets up every network of a pod."""

__version__ = "0.1.0"
