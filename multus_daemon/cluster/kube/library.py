"""Import the credential loaders of kubernetes_asyncio without its 860 modules generated from the API's definition.

A plain import takes 37 MiB and 0.2 s, which is more than the daemon without it; this one takes 0.4 MiB and 4 ms. The
library offers no smaller way: an import of any of its modules first runs `kubernetes_asyncio` and
`kubernetes_asyncio.client`, and these import everything. A process of its own would take the same from the memory limit
of the daemon's pod, at each start and each renewal of a certificate.

So the packages below are known by their directories and never run; their submodules are imported from there. urllib3
(1.8 MiB) is imported by `client.configuration` for a method that is not used here.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubernetes_asyncio.config.kube_config import KubeConfigLoader


def _known(name: str) -> ModuleType:
    """Put a package into `sys.modules` without running it. Raises ModuleNotFoundError."""
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.modules[name] = importlib.util.module_from_spec(spec)
    return sys.modules[name]


for _name in ("urllib3", "kubernetes_asyncio", "kubernetes_asyncio.config", "kubernetes_asyncio.client"):
    _known(_name)

# NB: these imports must follow the calls above; the order saves the memory.
from kubernetes_asyncio.client.configuration import Configuration  # noqa: E402

# `kube_config` imports both; the class that is used here makes no client.
vars(_known("kubernetes_asyncio.client")).update(Configuration=Configuration, ApiClient=None)
from kubernetes_asyncio.config.config_exception import ConfigException  # noqa: E402
from kubernetes_asyncio.config.incluster_config import (  # noqa: E402
    SERVICE_CERT_FILENAME,
    SERVICE_TOKEN_FILENAME,
    InClusterConfigLoader,
)

__all__ = [
    "SERVICE_CERT_FILENAME",
    "SERVICE_TOKEN_FILENAME",
    "ConfigException",
    "Configuration",
    "InClusterConfigLoader",
    "kubeconfig_loader",
]


def kubeconfig_loader() -> type[KubeConfigLoader]:
    """Import the kubeconfig loader, and yaml with it."""
    from kubernetes_asyncio.config.kube_config import KubeConfigLoader

    return KubeConfigLoader
