"""`ipMasq`: what a container sends beyond its own network leaves with the host's address.

Chains, rules, names and comments are those of the reference plugins (containernetworking/plugins `pkg/ip`, ipmasq), so
that either removes what the other made. Different on purpose: one attachment's removal leaves that of another
interface of the same container alone, and a container whose namespace has gone leaves no rules behind.
"""

from multus_daemon.plugins.builtin.masquerade.rules import (
    KEYS,
    add,
    forget,
    goes_by_name,
    is_wanted,
    remove,
    unsupported,
)

__all__ = ["KEYS", "add", "forget", "goes_by_name", "is_wanted", "remove", "unsupported"]
