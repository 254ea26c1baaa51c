"""Machine type and sections of a program: elf(5)."""

from __future__ import annotations

import os
import struct
from typing import Final

_SECTIONS_MAX: Final = 4096
HEAD_BYTES: Final = 20
"""Size of the head that `foreign_machine` needs."""

# Machine of `uname -m` -> values of e_machine; a 64-bit ARM kernel also runs 32-bit programs.
_MACHINES: Final = {
    "x86_64": (62,),
    "aarch64": (183, 40),
    "armv7l": (40,),
    "armv8l": (40,),
    "ppc64le": (21,),
    "s390x": (22,),
    "riscv64": (243,),
}
_NAMES: Final = {62: "x86_64", 183: "aarch64", 40: "arm", 21: "ppc64", 22: "s390x", 243: "riscv64", 3: "i386"}


class NoProgramError(ValueError):
    """The file is not an ELF program; the message gives the reason."""


def foreign_machine(head: bytes, machine: str = "") -> str:
    """Return the machine type that a program is for, if it is not `machine`; else an empty string.

    `head`: the file's first HEAD_BYTES. `machine`: as `uname -m`; empty: this machine. Raises NoProgramError.
    """
    if len(head) < HEAD_BYTES or head[:4] != b"\x7fELF":
        raise NoProgramError("is not an ELF program")
    order = {1: "<", 2: ">"}.get(head[5])
    if order is None:
        raise NoProgramError("is an ELF program of unknown byte order")
    (found,) = struct.unpack_from(f"{order}H", head, 18)
    if found in _MACHINES.get(machine or os.uname().machine, (found,)):
        return ""
    return _NAMES.get(found, f"machine {found}")


def read_section(descriptor: int, name: str, limit: int) -> bytes:
    """Return the first `limit` bytes of a section; empty if not found or not ELF. Raises OSError."""
    head = os.pread(descriptor, 64, 0)
    if len(head) < 64 or head[:4] != b"\x7fELF" or head[4] not in (1, 2) or head[5] not in (1, 2):
        return b""
    order, is_64 = "<" if head[5] == 1 else ">", head[4] == 2
    (table,) = struct.unpack_from(f"{order}{'Q' if is_64 else 'I'}", head, 0x28 if is_64 else 0x20)
    size, count, names = struct.unpack_from(f"{order}HHH", head, 0x3A if is_64 else 0x2E)
    # Fields sh_name, sh_offset and sh_size of a section header.
    layout = struct.Struct(f"{order}I20xQQ" if is_64 else f"{order}I12xII")
    if size < layout.size or count > _SECTIONS_MAX or names >= count:
        return b""
    headers = os.pread(descriptor, size * count, table)
    if len(headers) < size * count:
        return b""
    sections = [layout.unpack_from(headers, size * number) for number in range(count)]
    _, offset, length = sections[names]
    texts = os.pread(descriptor, min(length, 64 * 1024), offset)
    for start, offset, length in sections:
        if texts[start : texts.find(b"\0", start)] == name.encode():
            return os.pread(descriptor, min(length, limit), offset)
    return b""
