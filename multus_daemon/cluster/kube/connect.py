"""From the settings to a client of the API server, and to the store on it: whose credentials, for which node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import InCluster, Kubeconfig, Source
from multus_daemon.cluster.kube.errors import ConfigurationError
from multus_daemon.cluster.kube.node import VARIABLE, resolve_node_name
from multus_daemon.runtime import fs
from multus_daemon.runtime.gates import Gates
from multus_daemon.settings import KubernetesSettings, PerNodeCertificate

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.certs import CertificateManager, Connect

log = logging.getLogger(__name__)


class Connection:
    """The client that the settings ask for. `run` keeps its credentials good and is a root task."""

    def __init__(self, settings: KubernetesSettings, gates: Gates, environ: Mapping[str, str]) -> None:
        """Touches nothing. Raises ConfigurationError where the settings contradict each other."""
        self._settings = settings
        self._environ = environ
        self._manager: CertificateManager | None = None
        certificate = settings.per_node_certificate
        if certificate is not None and certificate.enabled:
            self._manager = self._certificate_manager(certificate, gates)
            bootstrap = Path(certificate.bootstrap_kubeconfig)
            self.client = ApiClient(
                Kubeconfig(bootstrap, self._manager.files.current), on_unauthorized=self._manager.rejected
            )
        else:
            self.client = ApiClient(source_of(settings))

    def _certificate_manager(self, found: PerNodeCertificate, gates: Gates) -> CertificateManager:
        for key, value in (("bootstrapKubeconfig", found.bootstrap_kubeconfig), ("certDir", found.cert_dir)):
            if not value:
                raise ConfigurationError(f"perNodeCertificate.{key}: must be set where perNodeCertificate is enabled")
        node = self._environ.get(VARIABLE)
        if not node:
            raise ConfigurationError(f"perNodeCertificate: needs the node's name, set {VARIABLE}")
        try:
            # The library behind them is large, and is not installed where no certificates are asked for.
            from multus_daemon.cluster.kube.approver import certificate_seconds
            from multus_daemon.cluster.kube.certificate_files import CertificateFiles
            from multus_daemon.cluster.kube.certs import CertificateManager

            seconds = certificate_seconds(found.cert_duration)
        except ImportError as error:
            raise ConfigurationError(f"perNodeCertificate: {error}; install multus-daemon[certificates]") from error
        except ValueError as error:
            raise ConfigurationError(f"perNodeCertificate.certDuration: {error}") from error
        return CertificateManager(
            node=node,
            files=CertificateFiles(Path(found.cert_dir)),
            connect=_connector(Path(found.bootstrap_kubeconfig)),
            on_renewed=lambda _path: self.client.reload(),
            gates=gates,
            seconds=seconds,
        )

    async def load(self) -> None:
        """Read what says how to reach the API server, so that what is wrong with it shows now.

        A certificate of the node's own need not be there yet. Raises ConfigurationError.
        """
        if self._manager is None:
            await self.client.load()

    async def node_name(self) -> str:
        """The name under which the cluster knows this node. Raises NodeNameError."""
        return await resolve_node_name(self.client, self._environ, socket.gethostname())

    @property
    def certificate_expires(self) -> float | None:
        """When this node's own certificate ends, Unix time; None where there is none. May be read in any thread."""
        return self._manager.expires if self._manager else None

    async def publish_kubeconfig(self, target: Path) -> None:
        """Write a kubeconfig that names the node's own certificate, once there is one, and stay. For other programs.

        The file with the certificate is replaced when it is renewed, the kubeconfig is not. Raises ConfigurationError,
        OSError.
        """
        settings = self._settings.per_node_certificate
        assert self._manager is not None and settings is not None, "needs perNodeCertificate"  # noqa: PT018
        certificate = await self._manager.usable()
        content = await asyncio.to_thread(Kubeconfig(Path(settings.bootstrap_kubeconfig)).for_certificate, certificate)
        await asyncio.to_thread(fs.write_atomic, target, content)
        log.info("kubeconfig %s is written, its certificate is in %s", target, certificate)
        await asyncio.Event().wait()

    async def run(self) -> None:
        """Renew what has to be renewed, for ever."""
        if self._manager is None:
            await asyncio.Event().wait()
        else:
            await self._manager.run()


def source_of(settings: KubernetesSettings) -> Source:
    """Where the credentials are read: a kubeconfig, or the pod's service account."""
    return Kubeconfig(Path(settings.kubeconfig)) if settings.kubeconfig else InCluster()


def _connector(bootstrap: Path) -> Connect:
    @contextlib.asynccontextmanager
    async def connect(certificate: Path | None) -> AsyncIterator[ApiClient]:
        # A client for each request: the bootstrap kubeconfig, and the CA in it, may have been replaced.
        async with ApiClient(Kubeconfig(bootstrap, certificate)) as client:
            yield client

    return connect
