"""The CNI specification, pure: errors, names, arguments, versions, configurations, results and their conversion.

Bytes or dicts in, values out or a `CniError`; no I/O, no clock, no asyncio.
"""
