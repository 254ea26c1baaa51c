"""CNI errors: the base class of all errors that the runtime sees, a subclass for each well-known code, and remedies.

Format: CNI SPEC, section 5 "Error". Codes: section "Error codes" and containernetworking/cni `pkg/types`. Codes below
100 are reserved by the specification; untyped errors of Go plugins have code 999.

Each error has an `Origin`: whose input it is about. The remedy follows from the origin, except for errors of plugin
binaries, where it follows from words of the message. An answer's `details` begin with the remedy, which Events,
`multusctl explain` and `kubectl multus why` show.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, Final

from multus_daemon.spec.cni import gojson


class Origin(Enum):
    """Whose input an error is about. The value: the remedy of errors without their own, and a name for the input.

    `{}` stands for the place of the input (`CniError.where`); without a place, for that name.
    """

    ANNOTATION = "correct {} in the pod's template", "the annotation"
    NETWORK = "correct {}", "the network's configuration"
    """A NetworkAttachmentDefinition, or a CNI configuration file of the node."""
    SETTINGS = "correct {}, and start the daemon's pod anew", "the daemon's configuration"
    CALL = "{} is wrong: look at the runtime's log and its version (containerd, CRI-O)", "the runtime's call"
    CLIENT = "correct {}", "the request"
    """A request of a person's program at the daemon's socket."""
    POD = "something has changed {} since its ADD; recreate the pod", "the pod's interface"
    """Links, addresses and routes that the pod's network namespace has now."""
    PLUGIN = "look at {}: the log of its own agent on the node, or its maker, may know more", "the plugin"
    """The behaviour or the output of a plugin's binary."""
    NODE = "`multusctl doctor` finds what {} lacks; the kernel's log (dmesg) may say more", "the node"
    """The kernel, the programs and the limits of the node."""
    DISK = "`multusctl doctor` checks {}", "the node's directories, files and disk"
    API = "look at {}; the daemon tries again", "the API server and the daemon's rights"
    DAEMON = "{} has the traceback: report it to the makers of this program", "the daemon's log"
    """A bug of this program."""
    NOBODY = "nothing needs to be done: {}", "the runtime tries again by itself"
    """A condition that ends by itself."""


_BY_CODE: dict[int, type[CniError]] = {}


class CniError(Exception):
    """An error as CNI defines it: a numeric code, a message whose first words are the cause, optional details.

    Attributes:
        origin: whose input it is about.
        where: the place of that input, with the host's paths and the user's names; empty if the message names it.
        remedy: what to do; empty: `advice` says what the origin suggests.
        details: what else is known, such as a plugin's output.
    """

    default_code: ClassVar[int] = 999
    default_origin: ClassVar[Origin | None] = None
    """The origin of an error that is made without one. None: each error of the class must have one."""

    default_where: ClassVar[str] = ""

    def __init_subclass__(cls, *, code: int | None = None, origin: Origin | None = None, where: str = "") -> None:
        """Register the subclass for `code`. An argument that is not given keeps the value of the base class."""
        if code is not None:
            cls.default_code = code
            _BY_CODE[code] = cls
        cls.default_origin = origin or cls.default_origin
        cls.default_where = where or cls.default_where

    def __init__(
        self, msg: str, details: str = "", *, remedy: str = "", origin: Origin | None = None, code: int | None = None
    ) -> None:
        super().__init__(msg)
        self.code = self.default_code if code is None else code
        self.msg = msg
        self.details = details
        self.remedy = remedy
        self.origin = origin or self.default_origin
        self.where = self.default_where

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.msg, self.explanation)))

    @property
    def explanation(self) -> str:
        """The remedy, if there is one, and the details."""
        return "; ".join(filter(None, (self.remedy, self.details)))

    @property
    def advice(self) -> str:
        """What to do: the remedy, else what follows from the errno of the cause, the plugin's words, or the origin."""
        if self.remedy:
            return self.remedy
        if self.origin in (Origin.NODE, Origin.DISK) and (known := _ERRNOS.get(errno_of(self))):
            return known
        if self.origin is Origin.PLUGIN and (known := of_plugin(self.code, self.msg)):
            return known
        if self.origin is None:
            return ""
        what, subject = self.origin.value
        return what.format(self.where or subject)

    def changed(self, msg: str = "", details: str | None = None, remedy: str = "", where: str = "") -> CniError:
        """Return a copy with the texts that are given; `where` is used only if the error has none yet.

        The cause (`__cause__`) of the copy is this error.
        """
        msg, details = msg or self.msg, self.details if details is None else details
        # Each class has arguments of its own.
        made = type(self).__new__(type(self), msg)
        vars(made).update(vars(self), msg=msg, details=details)
        made.remedy, made.where = remedy or self.remedy, self.where or where
        made.__cause__ = self
        return made

    def with_advice(self) -> CniError:
        """Return a copy with `advice` as its remedy, and with the host's paths in its texts."""
        return self.changed(*map(as_on_host, (self.msg, self.details, self.advice)))

    def with_context(self, context: str) -> CniError:
        """Return a copy with ` (context)` appended to its message."""
        return self.changed(f"{self.msg} ({context})")

    def to_object(self) -> dict[str, Any]:
        """Return `{"code": int, "msg": str}`, with `"details"` if there are any."""
        fields: dict[str, Any] = {"code": self.code, "msg": self.msg}
        return fields | {"details": self.explanation} if self.explanation else fields

    def to_json(self) -> bytes:
        """Return compact JSON, for the body of an HTTP answer."""
        return gojson.dumps(self.to_object(), sort_keys=False)

    def to_stdout(self) -> bytes:
        """Return the standard output of a plugin: JSON with 4 spaces of indentation, no newline at the end."""
        return gojson.dumps_indented(self.to_object(), sort_keys=False)


class IncompatibleVersionError(CniError, code=1, origin=Origin.NETWORK):
    """A CNI version is not supported, or not that of the other side."""


class UnsupportedFieldError(CniError, code=2, origin=Origin.NETWORK):
    """A field of the configuration is not supported; the message names the key."""


class UnknownContainerError(CniError, code=3, origin=Origin.NOBODY, where="the container is gone"):
    """The container does not exist; the runtime does not need to clean up."""


class InvalidEnvironmentError(CniError, code=4, origin=Origin.CALL):
    """A CNI_* variable is missing or bad; the message names it."""


class IoFailureError(CniError, code=5, origin=Origin.DISK):
    """Reading or writing failed."""


class DecodingFailureError(CniError, code=6):
    """The JSON is malformed, or not of the expected type."""


class InvalidNetworkConfigError(CniError, code=7, origin=Origin.NETWORK):
    """The network configuration is invalid."""


class InvalidAnnotationError(InvalidNetworkConfigError, origin=Origin.ANNOTATION):
    """An annotation of the pod is invalid."""


class InvalidNetnsError(
    CniError, code=8, origin=Origin.NOBODY, where="the runtime makes a new namespace when it tries again"
):
    """The network namespace is unusable."""


class TryAgainLaterError(CniError, code=11, origin=Origin.NOBODY):
    """The condition is temporary; the runtime should retry."""


class PluginNotAvailableError(CniError, code=50, origin=Origin.NODE):
    """STATUS: the plugin can't serve ADD requests."""


class LimitedConnectivityError(CniError, code=51, origin=Origin.NODE):
    """STATUS: the plugin can't serve ADD requests, and running containers may have limited connectivity."""


class InternalError(CniError, code=999, origin=Origin.NODE):
    """The error has no code of its own."""


class ChangedError(InternalError, origin=Origin.POD):
    """CHECK: the interface is not what the ADD reported."""


class UnexpectedError(InternalError, origin=Origin.DAEMON):
    """A bug of this program. `__cause__`: an exception that no code expects, or an UnexpectedError that has one."""


def fault(error: BaseException | None) -> BaseException | None:
    """Return the unexpected exception that caused `error`, if `error` is or comes from an `UnexpectedError`; else None.

    The log needs the traceback of that exception. For all other errors the message is enough.
    """
    looked_at = []
    while error is not None and not isinstance(error, UnexpectedError):
        if isinstance(error, BaseExceptionGroup):
            return next(filter(None, map(fault, error.exceptions)), None)
        # `raise error from error` makes a circle.
        looked_at.append(error)
        error = error.__cause__ if error.__cause__ not in looked_at else None
    while error is not None and isinstance(error.__cause__, UnexpectedError):
        error = error.__cause__
    return error and error.__cause__


def from_code(code: int, msg: str, details: str = "", *, remedy: str = "", origin: Origin | None = None) -> CniError:
    """Return an error with `code`: of the subclass that is registered for `code`, else a CniError."""
    return _BY_CODE.get(code, CniError)(msg, details, remedy=remedy, origin=origin, code=code)


def from_object(fields: dict[str, Any]) -> CniError:
    """Read the error that a plugin printed, with Go's rules: keys in any case. Raises gojson.JsonError."""
    code = gojson.get_int(fields, "code") or 0
    msg, details = (gojson.get_str(fields, key) or "" for key in ("msg", "details"))
    return from_code(code, msg, details, origin=Origin.PLUGIN)


# --- what to do ------------------------------------------------------------------------------------------------------

ASK_INTERFACE: Final = "ask for another interface in the pod's annotation, NETWORK@INTERFACE"
MORE: Final = "; more: "
"""Text between an error about a pod and the command that explains the error."""
HANGS: Final = "if it hangs, look at the log of the plugin's own agent on the node, which it may wait for"
_CAUSES_MAX: Final = 16

_SPACE: Final = "free space on the node's disk: `multusctl doctor` names the directories that are full"
_READ_ONLY: Final = "make the node's file system writable; the kernel's log (dmesg) says why it is not"
_FILES: Final = "raise the limit of open files (ulimit -n) of the daemon's pod or service"
_MEMORY: Final = (
    "raise the memory limit of the daemon's pod, in which plugins run; the kernel's log (dmesg) names the process"
)
_RIGHTS: Final = "give the daemon's container the capability that is needed; AppArmor or SELinux may refuse it too"
_MODULE: Final = (
    "load the kernel's module for it (modprobe on the node), or leave it out of the network's configuration"
)
_LEFT: Final = (
    "something of an earlier pod is left: `multusctl doctor` names links, rules and addresses without a record"
)
_BUSY: Final = (
    "something else on the node uses it: the master of a link must not be a port of a bridge or bond (ip -d link)"
)
_LINK: Final = "name a link that the node has (ip link) in the network's configuration, or bring the link back"

_ERRNOS: Final[Mapping[int, str]] = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EROFS: _READ_ONLY,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOMEM: _MEMORY,
    errno.EPERM: _RIGHTS,
    errno.EACCES: _RIGHTS,
    errno.ENODEV: _LINK,
    errno.EBUSY: _BUSY,
    errno.EOPNOTSUPP: _MODULE,
    errno.EAFNOSUPPORT: _MODULE,
    errno.EPROTONOSUPPORT: _MODULE,
}

_WORDS: Final[Mapping[str, str]] = {
    r"no space left on device": _SPACE,
    r"read-only file system": _READ_ONLY,
    r"too many open files": _FILES,
    r"cannot allocate memory|out of memory": _MEMORY,
    r"SIGKILL": (
        "if the kernel's log (dmesg) names the process, raise the memory limit of the daemon's pod, in which plugins "
        "run; else something on the node has killed it"
    ),
    r"SIGSEGV|SIGBUS|SIGILL|exec format error": "install the plugin again: its file is damaged or for another machine",
    r"permission denied|operation not permitted": _RIGHTS,
    r"unauthorized|forbidden|x509": (
        "the plugin's own credentials are refused: restart the plugin's agent on the node, and look at its ClusterRole"
    ),
    r"connection refused|no route to host|network is unreachable|i/o timeout|context deadline exceeded": (
        "what the plugin asks does not answer: look at the plugin's agent on the node, and at the address in the error"
    ),
    r"file exists|already exists": _LEFT,
    r"device or resource busy": _BUSY,
    r"resource temporarily unavailable|xtables lock": (
        "another program holds the lock: the runtime tries again by itself"
    ),
    r"no such device|link not found|no such network interface|no default route interface": _LINK,
    r"no such network namespace|failed to (?:open|stat) netns": "the runtime makes a new namespace when it tries again",
    r"prevResult": "something has changed the pod's interface since its ADD; recreate the pod",
    r"requested ip|duplicate allocation": "ask for another address in the pod's annotation",
    r"burst must also be set|rate must also be set": (
        "give rate and burst, in the pod's annotation or in the network's configuration"
    ),
    r"tentative": "look whether the link of the network is up and lets IPv6 neighbour discovery through",
    r"no address is left for|failed to allocate|no IP addresses available": (
        "give the network a larger range, or delete pods that use it"
    ),
    r"duplicate address": "remove the address from the other machine, or exclude it from the network's range",
    r"iptables|ip6tables|\bnft\b|executable file not found": (
        "look at the output of iptables or nft in the error: the node may lack that program or a kernel module"
    ),
}
"""What to do about an error of a plugin binary, by a pattern of its message (in any case). The first match counts."""

_CODES: Final[Mapping[int, str]] = {
    1: "set cniVersion in the network's configuration to a version that all of its plugins support",
    2: "remove the field from the network's configuration, or use a plugin that supports it",
    3: "nothing needs to be done: the container is gone",
    5: "`multusctl doctor` checks the disk, the files and the programs of the node",
    7: "correct the network's configuration",
    8: "the runtime makes a new namespace when it tries again",
    11: "the runtime tries again by itself",
    50: "`multusctl doctor` finds what the node lacks",
    51: "`multusctl doctor` finds what the node lacks",
}
"""What to do about an error of a plugin binary, by its code."""


def of_plugin(code: int, msg: str) -> str:
    """Return what to do about an error of a plugin binary, by its message, else by its code; empty if unknown."""
    known = (what for words, what in _WORDS.items() if re.search(words, msg, re.IGNORECASE))
    return next(known, _CODES.get(code, ""))


def errno_of(error: BaseException | None) -> int:
    """Return the errno of the OSError that `error` is or comes from; 0 if there is none."""
    for _ in range(_CAUSES_MAX):
        if error is None or isinstance(error, OSError):
            break
        error = error.__cause__
    return error.errno or 0 if isinstance(error, OSError) else 0


def as_on_host(text: str) -> str:
    """Return the text with paths as on the host: without /host and /hostroot, below which the manifests mount them."""
    return re.sub(r"(?<![\w./-])/host(?:root)?(?=/)", "", text)


def about_pod(error: CniError, pod: object, network: str = "") -> CniError:
    """Return the error with the pod appended to its message, and with a remedy.

    `network`: the network that the error is about; `NAMESPACE/NAME` if it is a NetworkAttachmentDefinition.
    """
    place = f"spec.config of NetworkAttachmentDefinition {network}" if "/" in network else ""
    error = error.changed(where=place if error.origin is Origin.NETWORK else "").with_advice()
    if place:
        remedy = error.remedy.replace(Origin.NETWORK.value[1], place)
        is_named = error.origin is not Origin.NETWORK or place in remedy
        error = error.changed(remedy=remedy if is_named else f"{remedy} ({place})")
    return error.with_context(f"pod {pod}")


def parted(text: str) -> tuple[str, str]:
    """Split the text of an error into its cause and the rest, which may be empty. Drops the command after `MORE`."""
    cause, _, details = text.partition(MORE)[0].partition("; ")
    return cause, details


def explain_command(environ: Mapping[str, str]) -> str:
    """Return the command with which a reader of a pod's Events gets the error explained."""
    namespace, pod = (environ.get(f"MULTUS_POD_{key}", "") for key in ("NAMESPACE", "NAME"))
    if namespace and pod:
        return f"kubectl -n {namespace} exec {pod} -- multusctl explain"
    return "kubectl multus why" if "KUBERNETES_SERVICE_HOST" in environ else "multusctl explain"
