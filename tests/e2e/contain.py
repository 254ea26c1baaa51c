"""`python -I -S contain.py FILE COMMAND...`: run a command with the rights of a container, which FILE describes.

Does what runc does, in the caller's network and process namespaces: mounts, control group, capabilities, seccomp.
`rights.py` writes FILE. Only the standard library is imported: each daemon of the tests waits for this program.
Linux 5.12 or newer. Constants and structures: the kernel's user API.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any, Final

_CLONE_NEWNS: Final = 0x20000
_CLONE_NEWCGROUP: Final = 0x2000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_SLAVE = 1, 2, 4, 8, 4096, 16384, 1 << 19
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442  # On every architecture.
_SYS_CAPSET: Final = {"x86_64": 126, "aarch64": 91}
_AT_FDCWD, _AT_RECURSIVE, _OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = -100, 0x8000, 1, 4
_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_SET_KEEPCAPS = 23, 24, 22, 38, 8
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_SECCOMP_MODE_FILTER: Final = 2

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Become the command."""
    given = json.loads(Path(sys.argv[1]).read_bytes())
    _mount(given)
    _give_up(given)
    os.execvp(sys.argv[2], sys.argv[2:])


# --- files ---------------------------------------------------------------------------------------------------------


def _mount(given: dict[str, Any]) -> None:
    _call("unshare", _CLONE_NEWNS)
    _bind("none", "/", _MS_REC | _MS_SLAVE)
    if given["cgroup"]:
        _enter(**given["cgroup"])
    for path in given["writable"]:
        Path(path).mkdir(parents=True, exist_ok=True)
    # Copies that are not mounted yet do not become read-only. The node's root is last: another may be above its place.
    copies = {path: _copy(path) for path in given["writable"] if given["readOnlyRoot"]}
    copies[given["hostRoot"]] = _copy("/")
    if given["readOnlyRoot"]:
        _set_attributes("/", _AT_RECURSIVE, add=_MS_RDONLY)
        for path in ("/proc", "/dev"):
            _set_attributes(path, 0, remove=_MS_RDONLY)
        _libc_mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=1777,size=65536k")
    for path, copy in copies.items():
        _system_call(_SYS_MOVE_MOUNT, copy, b"", _AT_FDCWD, path.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
        os.close(copy)
    for path in filter(os.path.exists, given["readonlyPaths"]):
        _bind(path, path, _MS_BIND | _MS_REC)
        _set_attributes(path, _AT_RECURSIVE, add=_MS_RDONLY)
    for path in filter(os.path.exists, given["maskedPaths"]):
        if os.path.isdir(path):
            _libc_mount("tmpfs", path, "tmpfs", _MS_RDONLY, "")
        else:
            _bind("/dev/null", path, _MS_BIND)
    # What was opened before is of the other mounts, the working directory too.
    os.chdir(os.getcwd())


def _copy(path: str) -> int:
    """Open a copy of the mounts below a path."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return _system_call(_SYS_OPEN_TREE, _AT_FDCWD, path.encode(), flags)


def _enter(point: str, kind: str, options: str, group: str) -> None:
    """Enter the control group and mount the hierarchy so that this is its root, as in a container."""
    if point != "/sys/fs/cgroup":
        _libc_mount("tmpfs", "/sys/fs/cgroup", "tmpfs", 0, "")
        os.mkdir(point)
    _libc_mount(kind, point, kind, 0, options)
    Path(point + group, "cgroup.procs").write_text("0")
    _call("umount2", point.encode(), 0)
    _call("unshare", _CLONE_NEWCGROUP)
    _libc_mount(kind, point, kind, 0, options)


def _bind(source: str, target: str, flags: int) -> None:
    _libc_mount(source, target, "", flags, "")


def _libc_mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    texts = [text.encode() for text in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), options.encode())


def _set_attributes(path: str, flags: int, add: int = 0, remove: int = 0) -> None:
    """mount_setattr(2)."""
    attributes = (ctypes.c_uint64 * 4)(add, remove, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _system_call(_SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, ctypes.byref(attributes), size)


# --- privileges ----------------------------------------------------------------------------------------------------


def _give_up(given: dict[str, Any]) -> None:
    granted = sum(1 << number for number in given["capabilities"])
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for number in range(64):
        if not granted >> number & 1 and _libc.prctl(_PR_CAPBSET_READ, ctypes.c_ulong(number), 0, 0, 0) == 1:
            _prctl(_PR_CAPBSET_DROP, number)
    _prctl(_PR_SET_KEEPCAPS, 1)
    # A user namespace that was made without privileges forbids it.
    with contextlib.suppress(PermissionError):
        os.setgroups([])
    os.setresgid(*[given["group"]] * 3)
    os.setresuid(*[given["user"]] * 3)
    os.umask(0o022)
    filter_ = base64.b64decode(given["filter"])
    # Without no_new_privs the filter needs SYS_ADMIN, which the capabilities may lack.
    if given["noNewPrivileges"]:
        _set_capabilities(granted)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _set_filter(filter_)
    else:
        _set_filter(filter_)
        _set_capabilities(granted)


def _set_capabilities(granted: int) -> None:
    """Make them the effective and permitted set; none is inheritable."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    low, high = granted & 0xFFFFFFFF, granted >> 32
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    _system_call(_SYS_CAPSET[platform.machine()], ctypes.byref(header), ctypes.byref(data))


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _set_filter(instructions: bytes) -> None:
    if instructions:
        program = _Program(len(instructions) // 8, instructions)
        _call("prctl", _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(program), 0, 0)


def _prctl(option: int, argument: int) -> None:
    _call("prctl", option, ctypes.c_ulong(argument), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


# --- calls ---------------------------------------------------------------------------------------------------------


def _system_call(number: int, *arguments: Any) -> int:
    return _call("syscall", ctypes.c_long(number), *arguments)


def _call(name: str, *arguments: Any) -> int:
    """Call a function of the C library. Raises OSError with its name."""
    result: int = getattr(_libc, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        what = " ".join([name, *(repr(each) for each in arguments if isinstance(each, (bytes, int)))])
        raise OSError(number, f"contain.py: {what}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    main()
