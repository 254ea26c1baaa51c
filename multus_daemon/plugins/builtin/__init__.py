"""Common CNI plugins, run inside the daemon: they behave as the reference plugins, without a program for each call."""
