"""Our own CNI network configuration, pure: its model and how it is read.

Bytes or dicts in, values out or a `CniError`; no I/O, no clock, no asyncio.
"""
