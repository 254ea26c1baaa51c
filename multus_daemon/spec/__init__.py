"""The specifications as values: CNI, the multi-network specification of the NPWG, and our own configuration.

Pure: bytes or dicts in, values out or an exception; no I/O, no clock, no log line.
"""
