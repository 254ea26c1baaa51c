"""Create objects in the API server, in place of a scheduler, kubelets and controllers."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Mapping
from typing import Any

from tests.e2e.kube_client import ApiError, Client
from tests.waiting import until

_IMAGE = {"image": "registry.invalid/none", "imageID": "", "restartCount": 0}


class Objects:
    """Objects of the cluster, made and changed as its administrator."""

    client: Client

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """One request (see `Client.request`)."""
        return self.client.request(method, path, body, **options)

    def apply(self, *manifests: dict[str, Any]) -> list[dict[str, Any]]:
        """Create each object, or make it what its manifest says; the objects as the server has them."""
        return [self.client.apply(manifest) for manifest in manifests]

    def get(self, api_version: str, kind: str, name: str, namespace: str = "default") -> dict[str, Any]:
        """One object. Raises ApiError (404) where there is none."""
        found: dict[str, Any] = self.client.get(self.client.resource(api_version, kind).path(namespace, name))
        return found

    def delete(self, api_version: str, kind: str, name: str, namespace: str = "default", *, grace: int = 0) -> bool:
        """Delete an object; whether it was there. With `grace` 0 a pod is gone at once, without its kubelet."""
        path = self.client.resource(api_version, kind).path(namespace, name)
        try:
            self.client.request("DELETE", path, gracePeriodSeconds=grace)
        except ApiError as error:
            if error.code != 404:
                raise
            return False
        return True

    def create_namespace(self, name: str, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
        """A namespace, if there is none yet."""
        metadata = {"name": name, "labels": dict(labels or {})}
        return self.client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})

    def create_node(
        self,
        name: str,
        *,
        address: str = "192.0.2.1",
        kubelet_port: int = 10250,
        labels: Mapping[str, str] | None = None,
    ) -> Any:
        """A node that says Ready."""
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
        self.client.apply(node)
        status = {
            "conditions": [_condition("Ready")],
            "addresses": [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet_port}},
        }
        return self.client.merge(self.client.path(node, "status"), {"status": status})

    def create_pod(
        self,
        name: str,
        *,
        namespace: str = "default",
        node: str = "",
        annotations: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        running: bool = True,
        **spec: Any,
    ) -> dict[str, Any]:
        """A new pod, bound to the node as a scheduler would, and running as its kubelet would say (a second request).

        Raises ApiError (409) where there is one of that name. `spec` adds to the pod's spec.
        """
        content: dict[str, Any] = {"containers": [{"name": "main", "image": "registry.invalid/none"}], **spec}
        if node:
            content["nodeName"] = node
        metadata = {"name": name, "annotations": dict(annotations or {}), "labels": dict(labels or {})}
        pods = self.client.resource("v1", "Pod").path(namespace)
        pod: dict[str, Any] = self.client.request(
            "POST", pods, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": content}
        )
        if node and running:
            status = {"phase": "Running", "conditions": [_condition("Ready"), _condition("ContainersReady")]}
            pod = self.client.merge(f"{pods}/{name}/status", {"status": status})
        return pod

    def create_daemon_pod(self, name: str, node: str, *, namespace: str, container: str) -> dict[str, Any]:
        """A pod of a DaemonSet of ours that runs on the node, as the manifests would have it there."""
        owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "kube-multus-ds", "uid": "of-no-object"}
        metadata = {"name": name, "labels": {"app": "multus", "name": "multus"}, "ownerReferences": [owner]}
        spec = {
            "nodeName": node,
            "hostNetwork": True,
            "containers": [{"name": container, "image": "registry.invalid/none"}],
        }
        pods = self.client.resource("v1", "Pod").path(namespace)
        self.client.request("POST", pods, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        running = {"name": container, "ready": True, "state": {"running": {}}, **_IMAGE}
        status = {"phase": "Running", "conditions": [_condition("Ready")], "containerStatuses": [running]}
        pod: dict[str, Any] = self.client.merge(f"{pods}/{name}/status", {"status": status})
        return pod

    def delete_pod(self, name: str, namespace: str = "default", *, grace: int = 0) -> bool:
        """Delete a pod; whether it was there."""
        return self.delete("v1", "Pod", name, namespace, grace=grace)

    def install_crd(self, crd: dict[str, Any], timeout: float = 20) -> None:
        """Install a CustomResourceDefinition, and wait until its objects can be made and listed in all its versions."""
        self.client.apply(crd)
        path = self.client.path(crd)
        names, group = crd["spec"]["names"], crd["spec"]["group"]

        def established() -> bool:
            # An explicit null at first.
            conditions = self.client.get(path).get("status", {}).get("conditions") or []
            return any(item["type"] == "Established" and item["status"] == "True" for item in conditions)

        self.wait_until(established, f"{crd['metadata']['name']} is established", timeout)
        for version in (item["name"] for item in crd["spec"]["versions"] if item["served"]):
            # The path is served a moment after the condition is set.
            objects = f"/apis/{group}/{version}/{names['plural']}"
            self.wait_until(functools.partial(self._served, objects), f"{objects} is served", timeout)

    def _served(self, path: str) -> bool:
        try:
            self.client.get(path, limit=1)
        except ApiError as error:
            if error.code not in (404, 429, 503):
                raise
            return False
        return True

    def create_service_account(self, namespace: str, name: str) -> dict[str, Any]:
        """A service account and its namespace, if there are none yet."""
        self.create_namespace(namespace)
        metadata = {"namespace": namespace, "name": name}
        return self.client.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})

    def request_token(self, namespace: str, name: str, *, seconds: int, bound_to: dict[str, Any] | None = None) -> str:
        """A token by the TokenRequest API. `bound_to` is a Pod, Secret or Node object: the token dies with it."""
        spec: dict[str, Any] = {"expirationSeconds": seconds}
        if bound_to is not None:
            metadata = bound_to["metadata"]
            reference = {"kind": bound_to["kind"], "apiVersion": bound_to["apiVersion"]}
            spec["boundObjectRef"] = {**reference, "name": metadata["name"], "uid": metadata["uid"]}
        path = self.client.resource("v1", "ServiceAccount").path(namespace, name, "token")
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        return str(self.client.request("POST", path, body)["status"]["token"])

    def publish_certificate(self, name: str, certificate: bytes) -> None:
        """Put the certificate (PEM) into the CertificateSigningRequest's status."""
        path = f"/apis/certificates.k8s.io/v1/certificatesigningrequests/{name}/status"
        self.client.merge(path, {"status": {"certificate": base64.b64encode(certificate).decode()}})

    @staticmethod
    def wait_until(holds: Callable[[], bool], what: str, timeout: float = 20) -> None:
        """Wait for something that happens by itself."""
        until(holds, timeout, f"not within {timeout:.0f} s: {what}")


def _condition(kind: str) -> dict[str, str]:
    return {"type": kind, "status": "True", "reason": "Test", "message": "set by the test"}
