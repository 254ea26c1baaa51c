"""Make the client of the API server from the settings, and determine this node's name in the cluster."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import InCluster, Kubeconfig, Source
from multus_daemon.cluster.kube.errors import ConfigurationError, KubeError
from multus_daemon.runtime import fs
from multus_daemon.runtime.aio import StartError, end, until_signal
from multus_daemon.runtime.gates import Gates
from multus_daemon.settings.keys import KubernetesSettings, PerNodeCertificate
from multus_daemon.spec.cni import names

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.certificate import CertificateManager

log = logging.getLogger(__name__)

VARIABLE: Final = "MULTUS_NODE_NAME"
_REMEDY: Final = f"set {VARIABLE} (fieldRef spec.nodeName in the DaemonSet)"


class Connection:
    """The client of the API server, as configured. `run` is a root task that renews the credentials."""

    def __init__(self, settings: KubernetesSettings, gates: Gates, environ: Mapping[str, str]) -> None:
        """Do no I/O. Raises ConfigurationError for contradictory settings."""
        self._settings = settings
        self._environ = environ
        self._manager: CertificateManager | None = None
        certificate = settings.per_node_certificate
        if certificate is not None and certificate.enabled:
            manager = self._manager = self._certificate_manager(certificate, gates)
            source = Kubeconfig(Path(certificate.bootstrap_kubeconfig), manager.files.current)
            self.client = ApiClient(source, on_unauthorized=manager.rejected)
        else:
            self.client = ApiClient(source_of(settings))

    def _certificate_manager(self, settings: PerNodeCertificate, gates: Gates) -> CertificateManager:
        for key, value in (("bootstrapKubeconfig", settings.bootstrap_kubeconfig), ("certDir", settings.cert_dir)):
            if not value:
                raise ConfigurationError(f"perNodeCertificate.{key}: must be set if perNodeCertificate is enabled")
        if not (node := self._environ.get(VARIABLE)):
            raise ConfigurationError(f"perNodeCertificate: needs the node's name, set {VARIABLE}")
        try:
            # Both need `cryptography`, which is large and not always installed.
            from multus_daemon.cluster.kube.certificate import CertificateFiles, CertificateManager
            from multus_daemon.cluster.kube.csr import certificate_seconds

            seconds = certificate_seconds(settings.cert_duration)
        except ImportError as error:
            raise ConfigurationError(f"perNodeCertificate: {error}; install multus-daemon[certificates]") from error
        except ValueError as error:
            raise ConfigurationError(f"perNodeCertificate.certDuration: {error}") from error

        return CertificateManager(
            node=node,
            files=CertificateFiles(Path(settings.cert_dir)),
            # Each request has a client of its own: the bootstrap kubeconfig or its CA may have been replaced.
            connect=lambda certificate: ApiClient(Kubeconfig(Path(settings.bootstrap_kubeconfig), certificate)),
            on_renewed=lambda: self.client.reload(),
            gates=gates,
            seconds=seconds,
        )

    async def load(self) -> None:
        """Read the credentials now, unless the node has its own certificate. Raises ConfigurationError."""
        if self._manager is None:
            await self.client.load()

    @property
    def certificate_expires(self) -> float | None:
        """The end of this node's own certificate, Unix time; None without one. Safe in any thread."""
        return self._manager.expires if self._manager else None

    async def publish_kubeconfig(self, target: Path) -> None:
        """Write a kubeconfig for the node's own certificate as soon as there is one, then wait for ever.

        A renewal replaces the certificate's file, not the kubeconfig. Raises ConfigurationError, OSError.
        """
        settings = self._settings.per_node_certificate
        assert self._manager is not None and settings is not None, "needs perNodeCertificate"  # noqa: PT018
        certificate = await self._manager.usable()
        content = await asyncio.to_thread(Kubeconfig(Path(settings.bootstrap_kubeconfig)).for_certificate, certificate)
        await asyncio.to_thread(fs.write_atomic, target, content)
        log.info("kubeconfig %s is written, its certificate is in %s", target, certificate)
        await asyncio.Event().wait()

    async def run(self) -> None:
        """Renew the node's own certificate for ever, if there is one."""
        if self._manager is None:
            await asyncio.Event().wait()
        else:
            await self._manager.run()


def keep_kubeconfig(settings: KubernetesSettings, target: Path) -> None:
    """Keep a kubeconfig at `target` with the node's certificate, until SIGTERM or SIGINT. Raises StartError."""

    async def work() -> None:
        connection = Connection(settings, Gates(), os.environ)
        tasks = {"credentials": connection.run(), "kubeconfig": connection.publish_kubeconfig(target)}
        try:
            await end(await until_signal(tasks))
        finally:
            fs.remove(target)
            log.info("%s is removed", target)

    try:
        asyncio.run(work())
    except OSError as error:
        raise StartError(str(error)) from error


def source_of(settings: KubernetesSettings) -> Source:
    """Return the source of the credentials: a kubeconfig, or the pod's service account."""
    return Kubeconfig(Path(settings.kubeconfig)) if settings.kubeconfig else InCluster()


async def resolve_node_name(client: ApiClient, environ: Mapping[str, str], hostname: str) -> str:
    """Return MULTUS_NODE_NAME, or `hostname` if the API server has a node of that name. Raises StartError."""
    if value := environ.get(VARIABLE):
        if problem := names.subdomain_problem(value):
            raise StartError(f"{VARIABLE}: {value!r} {problem}")
        return value
    # The kubelet's default is the host's name in lower case.
    name = hostname.strip().lower()
    if names.subdomain_problem(name):
        raise StartError(f"hostname {hostname!r} is not valid as the name of a node: {_REMEDY}")
    try:
        await client.request("GET", objects.node_path(name), timeout=deadlines.NODE_READ_SECONDS)
    except KubeError as error:
        if error.status == 404:
            raise StartError(f"the API server has no node with the host's name {name}: {_REMEDY}") from error
        raise StartError(f"cannot determine whether {name} is this node's name ({error}): {_REMEDY}") from error
    return name
