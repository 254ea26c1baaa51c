"""Ask the API server for one object that an informer does not have."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, TypeVar

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError, KubeError
from multus_daemon.cluster.kube.informer import Informer
from multus_daemon.cluster.kube.objects import Key
from multus_daemon.runtime.aio import KeyedLock
from multus_daemon.spec.cni import names
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import NetworkNotFoundError, StoreUnavailableError

T = TypeVar("T")

ABSENT_SECONDS: Final = 1.0  # without another request for a missing network
ABSENT_MAX: Final = 1024
_ADVICE: Final[Mapping[int | None, str]] = MappingProxyType(
    {
        401: "give the daemon a valid token: delete its pod, or renew the kubeconfig that it is configured with",
        403: "give the daemon's service account that verb on that resource: its ClusterRole is multus-daemon",
    }
)
"""By the HTTP status of a refusal."""


class NetworkLookup:
    """Finds NetworkAttachmentDefinitions: in the informer, or else by one request for each."""

    def __init__(
        self,
        client: ApiClient,
        informer: Informer[NetworkAttachmentDefinition],
        patience: float = deadlines.UNSYNCED_SECONDS,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        """`patience`: wait for the informer's first list, in seconds. `on_answer`: the API server has answered."""
        self._client = client
        self._informer = informer
        self._patience = patience
        self._on_answer = on_answer
        self._absent: OrderedDict[Key, float] = OrderedDict()
        self._running = KeyedLock()

    async def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """Ask the API server once for a network that the informer lacks. Raises as `ports.ClusterStore` says."""
        what = f"NetworkAttachmentDefinition {namespace}/{name}"
        key = (namespace, name)
        if (network := self._informer.get(key)) is not None:
            return network
        require_valid_name(what, namespace, name, NetworkNotFoundError)
        if not self._informer.synced.is_set():
            network = await self._informer.wait_for(key, lambda _: True, self._patience)
            if network is not None:
                return network
        # Many pods may ask for the same missing network at the same time.
        async with self._running.hold(f"{namespace}/{name}"):
            if (network := self._informer.get(key)) is not None:
                return network
            if self._absent.get(key, float("-inf")) > time.monotonic():
                raise NetworkNotFoundError(f"the API server has no {what}")
            try:
                with as_port_errors(what, self._informer, NetworkNotFoundError):
                    body = await self._client.request(
                        "GET", objects.network_path(namespace, name), timeout=deadlines.API_READ_SECONDS
                    )
                    self._on_answer()
                    return objects.decode_network(body).value
            except NetworkNotFoundError:
                self._absent[key] = time.monotonic() + ABSENT_SECONDS
                self._absent.move_to_end(key)
                if len(self._absent) > ABSENT_MAX:
                    self._absent.popitem(last=False)
                raise


def require_valid_name(what: str, namespace: str, name: str, missing: type[LookupError]) -> None:
    """Raise `missing` for an invalid name, which must not become part of a path."""
    problem = names.label_problem(namespace) or names.subdomain_problem(name)
    if problem:
        raise missing(f"{what}: the name {problem}")


@contextlib.contextmanager
def as_port_errors(what: str, informer: Informer[T], missing: type[LookupError]) -> Iterator[None]:
    """Turn errors of the API into those of `ports.ClusterStore`."""
    try:
        yield
    except ApiError as error:
        if error.status == 404:
            raise missing(f"the API server has no {what}") from error
        raise StoreUnavailableError(
            f"{what}: the API server refuses: {error}", _ADVICE.get(error.status, "")
        ) from error
    except KubeError as error:
        behind = "" if informer.synced.is_set() else f" ({informer.problem})"
        raise StoreUnavailableError(f"{what}: the API server can't be asked: {error}{behind}") from error
    except objects.DECODE_ERRORS as error:
        raise StoreUnavailableError(f"{what}: the API server's answer can't be decoded: {error}") from error
