"""Programs of Multus with the rights that the shipped manifests give them, read from the manifests.

`Container` starts every daemon of the end-to-end tests: with the capabilities, no_new_privs, the runtime's seccomp
profile, user and group, a memory limit, and a read-only root with the writable mounts. A field of a manifest that is
unknown here fails every test, so none is passed by. `python -m tests.repo.daemons` finds daemons that are started
otherwise.

A container has only the files of its image and its mounts. Here it can read all files of the machine: the programs of
the virtual environment are among them. Tests with the image are in `tests/e2e/cluster`.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import ctypes
import functools
import itertools
import json
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from multus_daemon import settings
from tests.e2e import contain
from tests.e2e.memory_group import MemoryGroup, missing
from tests.repo import manifests
from tests.repo.manifests import MANIFESTS, RENDERED

DEFAULTS: Final = Path(__file__).parents[1] / "data" / "runtime-default.json"
"""What containerd gives every container; `tools/containerd/defaults` writes it."""

# A list literal would be 41 lines.
_CAPABILITIES: Final = (  # noqa: SIM905
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE"
    " NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN"
    " SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE"
    " MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
).split()
"""By number: linux/capability.h."""
_NUMBERS = itertools.count(1)
_UNITS: Final = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


_CLI: Final = (sys.executable, "-m", "multus_daemon.cli")
"""`multus-daemon`."""


class RightsError(Exception):
    """This machine cannot give a process the rights of a container; the message says what it lacks."""


@dataclass(frozen=True)
class Rights:
    """The rights of a container."""

    capabilities: frozenset[str]
    """As a manifest has them: `NET_ADMIN`."""
    no_new_privileges: bool
    read_only_root: bool
    runtime_default: bool
    """True: the container runtime's seccomp profile."""
    user: int
    group: int
    memory: int
    """Limit in bytes."""
    writable: tuple[str, ...]
    """Paths of the writable mounts."""

    @property
    def status(self) -> dict[str, str]:
        """The fields of `status` that a process with these rights has."""
        granted = f"{sum(1 << _CAPABILITIES.index(name) for name in self.capabilities):016x}"
        return {
            "Uid": "\t".join([str(self.user)] * 4),
            "Gid": "\t".join([str(self.group)] * 4),
            "CapInh": "0" * 16,
            "CapPrm": granted,
            "CapEff": granted,
            "CapBnd": granted,
            "CapAmb": "0" * 16,
            "NoNewPrivs": str(int(self.no_new_privileges)),
            "Seccomp": str(2 * self.runtime_default),
        }

    def is_writable(self, path: str) -> bool:
        """Return True if the container can write the files below this path of its own."""
        return any(PurePosixPath(path).is_relative_to(mount) for mount in self.writable)


class Container:
    """Runs programs with the rights of a container. Use it as a context manager; then none of them is left."""

    def __init__(self, root: Path, rights: Rights | None = None, group: MemoryGroup | None = None) -> None:
        """`root`: a directory for its own files; `rights`: `SHIPPED`; `group`: instead of one with the limit."""
        self.host_root = root / "hostroot"
        """What the mount /hostroot is in the manifest: the machine's root, for these programs only."""
        self.host_root.mkdir(exist_ok=True)
        self._rights = SHIPPED if rights is None else rights
        self._group = group
        self._made: MemoryGroup | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._made = None

    def daemon(self, given: Mapping[str, Any], *arguments: str, writable: Collection[Path] = ()) -> list[str]:
        """Return the command line of `multus-daemon run ARGUMENTS...` with these settings. Raises RightsError.

        It can write to the directories in the settings that are writable in the shipped configuration, and to
        `writable`; a caller that names one says why.
        """
        return self.cli("run", *arguments, writable=[*writable_in(given), *writable])

    def cli(self, *words: str, wrapper: Sequence[str] = (), writable: Collection[Path] = ()) -> list[str]:
        """Return the command line of `multus-daemon WORDS...`; `wrapper`: a program that gets it, contained."""
        return self.command(*wrapper, *_CLI, *words, writable=writable)

    def command(self, *command: str, writable: Collection[Path] = ()) -> list[str]:
        """Return the command line of any program in the container. Raises RightsError."""
        if self._group is self._made is None and not missing():
            self._made = self._stack.enter_context(MemoryGroup(self._rights.memory))
        group = self._group or self._made
        rights, defaults = self._rights, json.loads(DEFAULTS.read_bytes())
        given = {
            "capabilities": [_CAPABILITIES.index(name) for name in rights.capabilities],
            "noNewPrivileges": rights.no_new_privileges,
            "readOnlyRoot": rights.read_only_root,
            "filter": base64.b64encode(seccomp_filter(rights.capabilities)).decode() if rights.runtime_default else "",
            "user": rights.user,
            "group": rights.group,
            "cgroup": group.mounted if group else None,
            "hostRoot": str(self.host_root),
            "writable": sorted({*map(str, writable)} - {str(self.host_root)}),
            "maskedPaths": defaults["maskedPaths"],
            "readonlyPaths": defaults["readonlyPaths"],
        }
        # Not in the node's directory, where tests look for changes. One for each program, which reads it at its start.
        description = _descriptions() / f"{next(_NUMBERS)}.json"
        description.write_text(json.dumps(given))
        return [sys.executable, "-I", "-S", contain.__file__, str(description), *command]


@functools.cache
def _descriptions() -> Path:
    folder = tempfile.mkdtemp(prefix="multus-rights-")
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


def status(process: Path) -> dict[str, str]:
    """Return what the kernel reports about the rights of a process, as `Rights.status`; `process`: its /proc/PID."""
    lines = (process / "status").read_text().splitlines()
    found = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {name: found[name] for name in SHIPPED.status}


# --- the manifest --------------------------------------------------------------------------------------------------


def of_container(pod: Mapping[str, Any], name: str) -> Rights:
    """Read the rights of a container from a pod's spec. Raises AssertionError for a field that is unknown here."""
    (container,) = [item for item in _containers(pod) if item["name"] == name]
    security = {**pod.get("securityContext", {}), **container["securityContext"]}
    understood = {"allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem", "runAsGroup", "runAsNonRoot"}
    understood |= {"runAsUser", "seccompProfile"}
    # Without effect here: security modules, and the group of a volume's files.
    understood |= {"appArmorProfile", "fsGroup", "seLinuxOptions"}
    assert security.keys() <= understood, security.keys() - understood
    capabilities = security["capabilities"]
    assert capabilities["drop"] == ["ALL"], "a runtime has defaults of its own"
    limits = container["resources"]["limits"]
    assert limits.keys() == {"memory"}, limits
    return Rights(
        capabilities=frozenset(capabilities.get("add", ())),
        no_new_privileges=not security["allowPrivilegeEscalation"],
        read_only_root=security["readOnlyRootFilesystem"],
        runtime_default=_is_runtime_default(security["seccompProfile"]),
        user=security.get("runAsUser", _user()[0]),
        group=security.get("runAsGroup", _user()[1]),
        memory=_bytes(limits["memory"]),
        writable=tuple(item["mountPath"] for item in container.get("volumeMounts", ()) if not item.get("readOnly")),
    )


def _is_runtime_default(profile: Mapping[str, str]) -> bool:
    assert profile["type"] in ("RuntimeDefault", "Unconfined"), profile
    return profile["type"] == "RuntimeDefault"


def _user() -> tuple[int, int]:
    """User and group of the image."""
    (found,) = re.findall(r"(?m)^USER (\d+):(\d+)$", (MANIFESTS.parent / "Dockerfile").read_text())
    return int(found[0]), int(found[1])


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) * _UNITS[quantity[-2:]]


def of_folder(folder: str, name: str) -> Rights:
    """Read the rights of a container of `manifests/FOLDER`."""
    pods = [
        item["spec"]["template"]["spec"]
        for item in manifests.objects(MANIFESTS / folder)
        if "template" in item.get("spec", {})
    ]
    (pod,) = [pod for pod in pods if any(item["name"] == name for item in _containers(pod))]
    return of_container(pod, name)


def _containers(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*pod["containers"], *pod.get("initContainers", ())]


def _shipped() -> tuple[Rights, dict[str, Any]]:
    objects = {item["kind"]: item for item in yaml.safe_load_all(RENDERED.read_text()) if item}
    pod = objects["DaemonSet"]["spec"]["template"]["spec"]
    # A test's daemon sees the machine's processes, and has the network that its test calls the host's.
    assert pod["hostPID"]
    assert pod["hostNetwork"]
    config = objects["ConfigMap"]["data"]["daemon-config.json"].encode()
    return of_container(pod, "kube-multus"), settings.parse(config, str(RENDERED)).effective()


SHIPPED, _SETTINGS = _shipped()


def writable_in(given: Mapping[str, Any]) -> list[Path]:
    """Return the paths in a daemon's settings that are below a writable mount in the shipped configuration."""
    everything = settings.Settings().effective() | dict(given)
    paths = {key: value for key, value in everything.items() if isinstance(value, str) and value.startswith("/")}
    return [Path(path) for key, path in paths.items() if SHIPPED.is_writable(str(_SETTINGS.get(key)))]


# --- seccomp -------------------------------------------------------------------------------------------------------

_ACT_ALLOW, _ACT_ERRNO, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050000, 1, 38
_OPERATORS: Final = {f"SCMP_CMP_{name}": number for number, name in enumerate(("LT", "LE", "EQ", "GE", "GT"), start=2)}
_OPERATORS["SCMP_CMP_MASKED_EQ"] = 7
_OTHER_ARCHITECTURES: Final = {0xC000003E: (0x40000003, 0x4000003E), 0xC00000B7: (0x40000028,)}
"""As containerd adds them: i386 and x32 to x86-64, arm to arm64."""


class _Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp`."""

    _fields_ = (
        ("index", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("one", ctypes.c_uint64),
        ("two", ctypes.c_uint64),
    )


@functools.cache
def seccomp_filter(capabilities: frozenset[str]) -> bytes:
    """Return the BPF program that runc makes of the profile. Raises RightsError."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise RightsError(f"needs libseccomp: install libseccomp2 ({error})") from error
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ACT_ERRNO | _EPERM)))
    native = library.seccomp_arch_native() & 0xFFFFFFFF
    for architecture in _OTHER_ARCHITECTURES[native]:
        _checked(library.seccomp_arch_add(context, ctypes.c_uint32(architecture)))
    newest = 0
    for rule in json.loads(DEFAULTS.read_bytes())["syscalls"]:
        if not {rule.get("with")} <= capabilities | {None} or rule.get("without") in capabilities:
            continue
        action = _ACT_ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else _ACT_ERRNO | rule["errnoRet"]
        compared = [
            _Comparison(item["index"], _OPERATORS[item["op"]], item["value"], item.get("valueTwo", 0))
            for item in rule.get("args", ())
        ]
        for name in rule["names"]:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number != -1:  # Unknown to this libseccomp: runc passes over it, too.
                newest = max(newest, number)
                arguments = (_Comparison * len(compared))(*compared)
                _checked(
                    library.seccomp_rule_add_array(
                        context, ctypes.c_uint32(action), number, len(compared), arguments if compared else None
                    )
                )
    with tempfile.TemporaryFile() as file:
        _checked(library.seccomp_export_bpf(context, file.fileno()))
        library.seccomp_release(context)
        file.seek(0)
        return _newer_are_unknown(native, newest) + file.read()


def _newer_are_unknown(native: int, newest: int) -> bytes:
    """As runc: ENOSYS for system calls that are newer than the profile, so that programs try older ones."""
    load, equal, greater, end = 0x20, 0x15, 0x25, 0x06
    architecture, number = 4, 0  # Offsets in `struct seccomp_data`.
    steps = (
        (load, 0, 0, architecture),
        (equal, 0, 3, native),
        (load, 0, 0, number),
        (greater, 0, 1, newest),
        (end, 0, 0, _ACT_ERRNO | _ENOSYS),
    )
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _checked(result: int) -> None:
    if result < 0:
        raise RightsError(f"libseccomp makes no filter: error {-result}")
