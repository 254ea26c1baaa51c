"""The objects of addresses that a cluster shares, of an API server that tests use one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Final

from tests.e2e.apiserver import ApiServer
from tests.e2e.kube_client import ApiError
from tests.waiting import until

RESERVATIONS: Final = "/apis/whereabouts.cni.cncf.io/v1alpha1/overlappingrangeipreservations"
CRDS: Final = ("overlappingrangeipreservations", "ippools")
NETWORKS: Final = "/apis/k8s.cni.cncf.io/v1/network-attachment-definitions"


def forget(server: ApiServer) -> None:
    """Remove the networks, all reservations, also those that a daemon has kept, and the custom resources.

    A daemon of a later test would ask for its right to addresses because of such a network.
    """
    with contextlib.suppress(ApiError):
        for item in server.request("GET", NETWORKS)["items"]:
            metadata = item["metadata"]
            if '"whereabouts"' in item.get("spec", {}).get("config", ""):
                server.delete(item["apiVersion"], item["kind"], metadata["name"], metadata["namespace"])
    with contextlib.suppress(ApiError):
        for item in server.request("GET", RESERVATIONS)["items"]:
            metadata = item["metadata"]
            place = f"{metadata['namespace']}/overlappingrangeipreservations/{metadata['name']}"
            path = RESERVATIONS.replace("overlappingrangeipreservations", f"namespaces/{place}")
            server.client.merge(path, {"metadata": {"finalizers": None}})
    kind = ("apiextensions.k8s.io/v1", "CustomResourceDefinition")
    for name in CRDS:
        deleted = partial(server.delete, *kind, f"{name}.whereabouts.cni.cncf.io")
        until(partial(_is_over, deleted), what=f"{name} are gone")


def _is_over(delete: Callable[[], bool]) -> bool:
    """Return True if there is nothing to delete."""
    return not delete()
