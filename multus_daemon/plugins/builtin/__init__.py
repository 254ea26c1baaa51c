"""Common plugins in this process: the reference plugins' behaviour without starting a program for each call."""
