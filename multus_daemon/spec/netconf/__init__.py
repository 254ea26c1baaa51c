"""Our own CNI network configuration, pure: its model, how it is read, and how it is generated.

Bytes or dicts in, values out or a `CniError`; no I/O, no clock, no asyncio.
"""
