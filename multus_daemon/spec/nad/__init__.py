"""The NPWG multi-network specification, pure: selection elements, definitions, status, device information.

Text or dicts in, values out or a `CniError`; no I/O, no clock, no asyncio.
"""
