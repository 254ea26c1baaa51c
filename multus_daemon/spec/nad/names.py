"""Names of Kubernetes objects and their validity (Kubernetes documentation, "Object Names and IDs")."""

from __future__ import annotations

import re

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LABEL_MAX = 63
SUBDOMAIN_MAX = 253


def label_problem(value: str) -> str:
    """Return the reason why `value` is not a DNS-1123 label, such as a namespace; empty if it is one."""
    if not value:
        return "is empty"
    if len(value) > LABEL_MAX:
        return f"is longer than {LABEL_MAX} characters"
    if not _LABEL.fullmatch(value):
        return "must consist of a-z, 0-9 and '-', and begin and end with a letter or digit"
    return ""


def subdomain_problem(value: str) -> str:
    """Return the reason why `value` is not a DNS-1123 subdomain, such as a pod's name; empty if it is one.

    As in Kubernetes, only the whole has a maximum length, not each label.
    """
    if not value:
        return "is empty"
    if len(value) > SUBDOMAIN_MAX:
        return f"is longer than {SUBDOMAIN_MAX} characters"
    if not all(_LABEL.fullmatch(part) for part in value.split(".")):
        return "must consist of a-z, 0-9, '-' and '.', and each part begin and end with a letter or digit"
    return ""
