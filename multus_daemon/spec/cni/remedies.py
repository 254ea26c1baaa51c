"""Remedies of errors that come without one: by known words of the kernel and of plugins, else by the code.

An error of ours has its remedy in `details`, from where it is raised. The errors of plugin binaries, and of the kernel
in the words of a built-in plugin, have none. `advised` puts one first in the details: Events, `multusctl explain` and
`kubectl multus why` show the details as what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from multus_daemon.spec.cni.errors import CniError, from_code

MORE: Final = "; more: "
"""Before the command at the end of an error about a pod that explains it."""
HANGS: Final = "if it hangs, look at the log of the plugin's own agent on the node, which it may wait for"
OF_PLUGIN: Final = 'plugin "'
"""Details begin with this if they only name the plugin that failed (`plugins.process`)."""

_WORDS: Final[tuple[tuple[str, str], ...]] = (
    (
        r"no space left on device",
        "free space on the node's disk: `multusctl doctor` names the directories that are full",
    ),
    (r"read-only file system", "make the node's file system writable; the kernel's log (dmesg) says why it is not"),
    (r"too many open files", "raise the limit of open files (ulimit -n) of the daemon's pod or service"),
    (
        r"cannot allocate memory|out of memory|SIGKILL",
        "raise the memory limit of the daemon's pod, in which plugins run; the kernel's log (dmesg) names the process",
    ),
    (
        r"SIGSEGV|SIGBUS|SIGILL|exec format error",
        "install the plugin again: its file is damaged or for another machine",
    ),
    (
        r"permission denied|operation not permitted",
        "give the daemon's container the capability that the plugin needs; AppArmor or SELinux may refuse it too",
    ),
    (
        r"unauthorized|forbidden|x509",
        "the plugin's own credentials are refused: restart the plugin's agent on the node, and look at its ClusterRole",
    ),
    (
        r"connection refused|no route to host|network is unreachable|i/o timeout|context deadline exceeded",
        "what the plugin asks does not answer: look at the plugin's agent on the node, and at the address in the error",
    ),
    (
        r"file exists|already exists",
        "something of an earlier pod is left: `multusctl doctor` names links, rules and addresses without a record",
    ),
    (
        r"resource temporarily unavailable|xtables lock",
        "another program holds the lock: the runtime tries again by itself",
    ),
    (
        r"no such device|link not found|no such network interface|no default route interface",
        "name a link that the node has (ip link) in the network's configuration, or bring the link back",
    ),
    (
        r"no such network namespace|failed to (?:open|stat) netns",
        "the runtime makes a new namespace when it tries again",
    ),
    (
        r"prevResult|was not found in|is not on it|there is none|has MAC|Tuning configured"
        r"|is not a .+ but|is no port of|is down|does not have link type|promiscMode is|has the non-loopback address"
        r"|failed to (?:find|match) addr",
        "something has changed the pod's interface since its ADD; recreate the pod",
    ),
    (r"requested ip|duplicate allocation", "ask for another address in the pod's annotation"),
    (r"tentative", "look whether the link of the network is up and lets IPv6 neighbour discovery through"),
    (r"no address is left for|failed to allocate", "give the network a larger range, or delete pods that use it"),
    (r"tried again later", "nothing needs to be done: the daemon tries again"),
    (r"duplicate address", "remove the address from the other machine, or exclude it from the network's range"),
    (
        r"iptables|ip6tables|\bnft|spoof-check|failed \(exit status|executable file not found",
        "look at the output of iptables or nft in the error: the node may lack that program or a kernel module",
    ),
    (
        r"must be|should be|invalid|missing|failed to parse|cannot use|cannot set|overlap|too small",
        "correct the network's configuration",
    ),
)
"""Words, as a pattern without regard to case, and what to do. The first that fits counts."""

_CODES: Final[Mapping[int, str]] = MappingProxyType(
    {
        1: "set cniVersion in the network's configuration to a version that all of its plugins support",
        2: "remove the field from the network's configuration, or use a plugin that supports it",
        3: "nothing needs to be done: the container is gone",
        4: "the runtime's call is wrong: look at its log and its version (containerd, CRI-O)",
        5: "`multusctl doctor` checks the disk, the files and the programs of the node",
        6: "correct the JSON",
        7: "correct the network's configuration",
        8: "the runtime makes a new namespace when it tries again",
        11: "the runtime tries again by itself",
        50: "`multusctl doctor` finds what the node lacks",
        51: "`multusctl doctor` finds what the node lacks",
    }
)


def remedy(error: CniError) -> str:
    """Return what to do about the error, by its message, else by its code; empty if neither is known."""
    for words, what in _WORDS:
        if re.search(words, error.msg, re.IGNORECASE):
            return what
    return _CODES.get(error.code, "")


def about_pod(error: CniError, pod: object) -> CniError:
    """Return the error with the pod appended to the message, and with a remedy, if its details have none."""
    details = error.details
    if not details or details.startswith(OF_PLUGIN):
        details = "; ".join(filter(None, (remedy(error), details)))
    return from_code(error.code, f"{error.msg} (pod {pod})", details)


def parted(text: str) -> tuple[str, str]:
    """Return the cause and the remedy, empty if there is none, of an error as text without the command at its end."""
    cause, _, details = text.partition(MORE)[0].partition("; ")
    return cause, "" if details.startswith(OF_PLUGIN) else details


def explain_command(environ: Mapping[str, str]) -> str:
    """Return the command that explains an error about a pod, as it works for a reader of that pod's Events."""
    namespace, pod = (environ.get(f"MULTUS_POD_{key}", "") for key in ("NAMESPACE", "NAME"))
    if namespace and pod:
        return f"kubectl -n {namespace} exec {pod} -- multusctl explain"
    return "kubectl multus why" if "KUBERNETES_SERVICE_HOST" in environ else "multusctl explain"
