"""Which machine a program is for: elf(5)."""

from __future__ import annotations

import os
import struct
from typing import Final

HEAD_BYTES: Final = 20
"""As much of a file as is looked at."""

# e_machine by what `uname -m` says; a 64-bit ARM kernel runs 32-bit programs too.
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
    """It is no ELF file; the message says what is wrong."""


def foreign_machine(head: bytes, machine: str = "") -> str:
    """The machine that the program is for, where that is another than `machine`; else empty.

    `head`: the file's first bytes. `machine`: what `uname -m` says; empty: this one. Raises NoProgramError.
    """
    if len(head) < HEAD_BYTES or head[:4] != b"\x7fELF":
        raise NoProgramError("is no ELF program")
    order = {1: "<", 2: ">"}.get(head[5])
    if order is None:
        raise NoProgramError("is an ELF program of no known byte order")
    (found,) = struct.unpack_from(f"{order}H", head, 18)
    if found in _MACHINES.get(machine or os.uname().machine, (found,)):
        return ""
    return _NAMES.get(found, f"machine {found}")
