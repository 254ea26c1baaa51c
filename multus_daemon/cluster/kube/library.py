"""What this package takes of kubernetes_asyncio, without the 860 modules that are generated from the API's definition.

`kubernetes_asyncio` and `kubernetes_asyncio.client` import all of them: a model for each type, a class for each API
group. None is used here, and they take 34 MB and half of the daemon's time to start. So these two packages are not
executed: each becomes a module that knows its directory, and submodules are imported from there. The same is done to
urllib3, which `client.configuration` imports for a method that nobody calls here, and to `kubernetes_asyncio.config`:
what reads kubeconfigs is only for those who have one.

Such a module executes itself on the first access to a name that it does not have, and is complete from then on: a
version of the library that needs more than this one works as well, and only takes the memory. An ImportWarning tells of
it, which Python does not show by default; in tests it is an error.
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
    """Put the module into `sys.modules`; it is executed when it is asked for a name that is not in `known`."""
    if (loaded := sys.modules.get(name)) is not None:
        return loaded
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module, loader = importlib.util.module_from_spec(spec), spec.loader

    def complete(attribute: str) -> Any:
        # Whatever looks through all modules (inspect, unittest) asks for names like these, and can do without.
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
    """Stand for `kubernetes_asyncio.client.ApiClient`, which `kube_config` imports for functions not called here."""
    from kubernetes_asyncio.client.api_client import ApiClient

    return ApiClient(*arguments, **options)


defer("urllib3")
defer("kubernetes_asyncio")
defer("kubernetes_asyncio.config")
_client = defer("kubernetes_asyncio.client", {"ApiClient": _api_client})

# Only now: the order of these lines is what saves the memory.
from kubernetes_asyncio.client.configuration import Configuration  # noqa: E402

vars(_client).setdefault("Configuration", Configuration)

# The HTTP library that kubernetes_asyncio brings along.
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
    """Import what reads a kubeconfig, yaml too."""
    from kubernetes_asyncio.config.kube_config import KubeConfigLoader

    return KubeConfigLoader
