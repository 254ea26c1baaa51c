"""Import what this package needs of kubernetes_asyncio, without its 860 modules generated from the API's definition.

`kubernetes_asyncio` and `kubernetes_asyncio.client` import all of these modules: 34 MB, and half of the daemon's start.
So both packages are not executed: each becomes a module that knows its directory, and submodules are imported from
there. The same is done to urllib3, which `client.configuration` imports for an unused method, and to
`kubernetes_asyncio.config`, whose kubeconfig loader is imported only for a kubeconfig.

Such a module executes itself on the first access to a missing name: a version of the library that needs more still
works and only takes the memory. It issues an ImportWarning, which Python hides by default and tests treat as an error.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kubernetes_asyncio.config.kube_config import KubeConfigLoader


def defer(name: str, known: Mapping[str, Any] | None = None) -> ModuleType:
    """Put the module into `sys.modules`; access to a name that is not in `known` executes it."""
    if (loaded := sys.modules.get(name)) is not None:
        return loaded
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module, loader = importlib.util.module_from_spec(spec), spec.loader

    def complete(attribute: str) -> Any:
        # Code that inspects all modules (inspect, unittest) asks for dunder names and does not need them.
        if not attribute.startswith("__"):
            warnings.warn(f"{name} is loaded whole, for its {attribute}", ImportWarning, stacklevel=2)
            # From here on the module is like any other, also for its own code.
            vars(module).pop("__getattr__", None)
            loader.exec_module(module)
        try:
            return vars(module)[attribute]
        except KeyError:
            raise AttributeError(
                f"module {name!r} has no attribute {attribute!r}", name=attribute, obj=module
            ) from None

    vars(module).update(known or {}, __getattr__=complete)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _api_client(*arguments: Any, **options: Any) -> Any:
    """Stand in for `kubernetes_asyncio.client.ApiClient`, which `kube_config` imports for functions not called here."""
    from kubernetes_asyncio.client.api_client import ApiClient

    return ApiClient(*arguments, **options)


defer("urllib3")
defer("kubernetes_asyncio")
defer("kubernetes_asyncio.config")
_client = defer("kubernetes_asyncio.client", {"ApiClient": _api_client})

# NB: these imports must follow the calls above; the order saves the memory.
from kubernetes_asyncio.client.configuration import Configuration  # noqa: E402

vars(_client).setdefault("Configuration", Configuration)

# The HTTP library that kubernetes_asyncio depends on.
from kubernetes_asyncio.client.rest import aiohttp  # type: ignore[attr-defined]  # noqa: E402
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
    "aiohttp",
    "kubeconfig_loader",
]


def kubeconfig_loader() -> type[KubeConfigLoader]:
    """Import the kubeconfig loader, and yaml with it."""
    from kubernetes_asyncio.config.kube_config import KubeConfigLoader

    return KubeConfigLoader
