"""A real Kubernetes API server for tests: etcd and kube-apiserver on loopback, everything in one temporary directory.

RBAC and the Node authorizer are on, nobody is anonymous, and there is no controller but what the test does itself:
no default service accounts, no garbage collection, a deleted namespace stays Terminating, and nobody signs
certificates (`sign_certificate`) or runs pods (`create_pod` says Running).
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tests.e2e import audit, build_tools, tokens
from tests.e2e.certificates import Authority
from tests.e2e.kube_client import ApiError, Client
from tests.e2e.kube_objects import Objects
from tests.e2e.server_process import ServerProcess, free_port

ISSUER: Final = "https://kubernetes.default.svc"
SERVICE_ADDRESS: Final = "10.96.0.1"
"""Address of the service `kubernetes`: the first one of `--service-cluster-ip-range`."""
AUDIT_MARK: Final = "/version?audit-mark="
_ALONE: Final = (
    # It wants each namespace's `default` account, which the controller manager makes.
    "--disable-admission-plugins=ServiceAccount",
    # Kubelets are `exec_kubelet`'s, which speak websocket only: without this the server would speak SPDY to them.
    # Extended resources by claim are on by default from Kubernetes 1.36 on.
    "--feature-gates=TranslateStreamCloseWebsocketRequests=false,DRAExtendedResource=true",
)
"""Flags of a server without controllers and real kubelets."""


class ServerError(Exception):
    """The server did not do what a test needs in time; the message ends with its logs."""


class ApiServer(Objects):
    """Use it as a context manager. All methods block: in an asynchronous test, call them with `asyncio.to_thread`."""

    def __init__(self, *flags: str, is_controlled: bool = False, instead: Mapping[str, Path] | None = None) -> None:
        """`flags` are further arguments of kube-apiserver.

        `is_controlled`: a controller manager will run, so pods get their service accounts. `instead`: other programs
        than those of `build_tools`, by name.

        Raises `build_tools.ToolError` where a program is missing, `OpensslError` where openssl is.
        """
        programs = build_tools.find_all(build_tools.CONTROL_PLANE, instead)
        self.directory = Path(tempfile.mkdtemp(prefix="multus-apiserver-"))
        try:
            self._lay_out(programs, flags, is_controlled)
        except BaseException:
            shutil.rmtree(self.directory)
            raise

    def _lay_out(self, programs: dict[str, Path], flags: Sequence[str], is_controlled: bool) -> None:
        names = ("DNS:localhost", "DNS:kubernetes", "DNS:kubernetes.default.svc")
        self.authority = Authority(self.directory / "pki", ("IP:127.0.0.1", f"IP:{SERVICE_ADDRESS}", *names))
        self.ca_file = self.authority.certificate
        self._is_controlled = is_controlled
        self.way_to_nodes = self.directory / "nodes.sock"
        """Where it looks for the proxy by which it reaches kubelets (`cluster.way_in`), where `is_controlled`."""
        self.sign_key, verify_key = self.directory / "pki" / "sa.key", self.directory / "pki" / "sa.pub"
        tokens.new_signing_key(self.sign_key, verify_key)
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self._numbers = itertools.count(1)
        self._relays: list[Any] = []
        self._audit_log = self.directory / "audit.log"
        self._audit_policy = self.directory / "audit-policy.json"
        self._audit_policy.write_text(json.dumps(audit.POLICY))
        etcd_url = f"http://127.0.0.1:{free_port()}"
        self.etcd = ServerProcess("etcd", [str(programs["etcd"]), *self._etcd_flags(etcd_url)], self.directory)
        self.server = ServerProcess(
            "kube-apiserver",
            [str(programs["kube-apiserver"]), *self._server_flags(etcd_url, verify_key), *flags],
            self.directory,
        )
        admin = self.authority.client("admin", "admin", ("system:masters",))
        self.client = Client(self.url, self.ca_file, pair=admin)
        self.admin_kubeconfig = self._write_kubeconfig(
            "admin", {"client-certificate": str(admin.certificate), "client-key": str(admin.key)}
        )

    def _etcd_flags(self, url: str) -> list[str]:
        peer = f"http://127.0.0.1:{free_port()}"
        return [
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            # The data lives as long as the test.
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _server_flags(self, etcd_url: str, verify_key: Path) -> list[str]:
        pair = self.authority.server()
        return [
            f"--etcd-servers={etcd_url}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            # Nobody reaches the service `kubernetes` here, and loopback is no valid endpoint.
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--tls-cert-file={pair.certificate}",
            f"--tls-private-key-file={pair.key}",
            f"--client-ca-file={self.ca_file}",
            "--anonymous-auth=false",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            *(self._node_flags() if self._is_controlled else _ALONE),
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-signing-key-file={self.sign_key}",
            f"--service-account-key-file={verify_key}",
            # Tokens end when they say so, not a year later.
            "--service-account-extend-token-expiration=false",
            "--allow-privileged=true",
            f"--audit-policy-file={self._audit_policy}",
            f"--audit-log-path={self._audit_log}",
            "--audit-log-maxsize=10000",
            "--profiling=false",
        ]

    def _node_flags(self) -> list[str]:
        """How kubelets are reached, and who it is to them."""
        transport = {"uds": {"udsName": str(self.way_to_nodes)}}
        connection = {"proxyProtocol": "HTTPConnect", "transport": transport}
        selector = {
            "apiVersion": "apiserver.k8s.io/v1beta1",
            "kind": "EgressSelectorConfiguration",
            "egressSelections": [{"name": "cluster", "connection": connection}],
        }
        path = self.directory / "egress.json"
        path.write_text(json.dumps(selector))
        pair = self.authority.client("kubelet-client", "kube-apiserver-kubelet-client", ("system:masters",))
        return [
            f"--egress-selector-config-file={path}",
            f"--kubelet-client-certificate={pair.certificate}",
            f"--kubelet-client-key={pair.key}",
        ]

    # --- its life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> ApiServer:
        try:
            self.etcd.start()
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        for relay in self._relays:
            relay.close()
        self.server.stop()
        self.etcd.stop()
        shutil.rmtree(self.directory)

    def start(self, timeout: float = 60) -> None:
        """Start kube-apiserver, the first time or again, on the same port and data; back when it is ready."""
        self.server.start()
        self.wait_ready(timeout)
        for relay in self._relays:
            relay.start()

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End kube-apiserver, so that connections are refused; etcd stays. SIGTERM ends it in good order."""
        for relay in self._relays:
            relay.stop()
        self.server.stop(number)

    def pause(self) -> None:
        """Freeze kube-apiserver: connections are taken, and nothing is answered."""
        self.server.pause()

    def resume(self) -> None:
        """Let a frozen kube-apiserver go on."""
        self.server.resume()

    def wait_ready(self, timeout: float = 60) -> None:
        """Wait until `/readyz` says ok and the namespaces that every cluster has are there. Raises ServerError."""
        deadline = time.monotonic() + timeout
        last: Exception | None = None
        while time.monotonic() < deadline:
            for process in (self.etcd, self.server):
                if not process.running:
                    raise ServerError(f"{process.name} has ended\n{self.logs()}")
            try:
                self.client.get("/readyz")
                # On a new server these come a moment after it says ready.
                for name in ("default", "kube-system"):
                    self.client.get(f"/api/v1/namespaces/{name}")
            except (ApiError, OSError, http.client.HTTPException) as error:
                last = error
                time.sleep(0.05)
            else:
                return
        raise ServerError(f"kube-apiserver is not ready after {timeout:.0f} s: {last}\n{self.logs()}")

    def logs(self) -> str:
        """The ends of the logs."""
        return f"{self.etcd.tail()}\n{self.server.tail()}"

    @contextlib.contextmanager
    def reachable_in(self, namespace: str, *, as_service: bool = False) -> Iterator[str]:
        """The URL, which also leads here from inside a network namespace (path) whose loopback device is up.

        `as_service`: where pods of the host's network look for it, at SERVICE_ADDRESS, which the namespace has.
        """
        # Only here: this needs the daemon's package, the rest of the harness does not.
        from tests.e2e.relay import Relay

        relay = Relay(namespace, self.port, at=(SERVICE_ADDRESS, 443) if as_service else None)
        self._relays.append(relay)
        try:
            if self.server.running:
                relay.start()
            yield self.url
        finally:
            self._relays.remove(relay)
            relay.close()

    # --- users -------------------------------------------------------------------------------------------------------

    def kubeconfig(self, user: str, groups: Sequence[str] = (), *, seconds: float = 10 * 24 * 3600) -> Path:
        """A kubeconfig with a client certificate, such as for `system:node:x` of the group `system:nodes`."""
        name = f"user-{next(self._numbers)}"
        pair = self.authority.client(name, user, tuple(groups), seconds=seconds)
        return self._write_kubeconfig(name, {"client-certificate": str(pair.certificate), "client-key": str(pair.key)})

    def kubeconfig_for_token(self, token: str | Path) -> Path:
        """A kubeconfig with a token; of a path, the file is named, which the test can replace (`tokenFile`)."""
        user = {"tokenFile": str(token)} if isinstance(token, Path) else {"token": token}
        return self._write_kubeconfig(f"user-{next(self._numbers)}", user)

    def client_for_token(self, token: str) -> Client:
        """A client that shows the token; close it."""
        return Client(self.url, self.ca_file, token=token)

    def service_account_token(
        self, namespace: str, name: str, *, seconds: float = 3600, bound_to: dict[str, Any] | None = None
    ) -> str:
        """A token for a service account, which is made if it is not there.

        By the TokenRequest API; it gives none for less than 600 s, so a shorter one is signed here (see `tokens.mint`
        for what `exp` it has), and cannot be `bound_to` an object.
        """
        account = self.create_service_account(namespace, name)
        if seconds >= tokens.SHORTEST_REQUEST:
            return self.request_token(namespace, name, seconds=int(seconds), bound_to=bound_to)
        if bound_to is not None:
            raise ValueError(f"a token bound to an object lives for {tokens.SHORTEST_REQUEST} s or more")
        return tokens.mint(self.sign_key, ISSUER, account, seconds=seconds)

    def sign_certificate(self, name: str, *, seconds: float = 3600) -> None:
        """Sign an approved CertificateSigningRequest, as a signer of the controller manager would."""
        csr = self.get("certificates.k8s.io/v1", "CertificateSigningRequest", name)
        request = base64.b64decode(csr["spec"]["request"])
        self.publish_certificate(name, self.authority.sign(request, seconds=seconds))

    def _write_kubeconfig(self, name: str, user: dict[str, Any]) -> Path:
        path = self.directory / f"{name}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self.ca_file)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(content))
        path.chmod(0o600)
        return path

    # --- what was asked of it ----------------------------------------------------------------------------------------

    def audit_mark(self) -> int:
        """A place in the audit log: `audit(since=mark)` gives what has been answered after it."""
        self._flush_audit()
        return self._audit_log.stat().st_size

    def audit(self, user: str | None = None, *, since: int = 0) -> list[audit.Request]:
        """All requests, or those of a user such as `system:serviceaccount:kube-system:multus`, in order of answers.

        A watch is listed once it has begun. The marks that this method itself leaves are not in the list.
        """
        self._flush_audit()
        requests = audit.parse(audit.read(self._audit_log, since))
        return [
            request
            for request in requests
            if not request["uri"].startswith(AUDIT_MARK) and user in (None, request["user"])
        ]

    def _flush_audit(self) -> None:
        """Wait until the log holds what has been answered: the line of a request made now comes after theirs.

        NB: of an answer longer than some KiB the client may see all before its line is written (a moment later).
        """
        if not self.server.running:
            return
        mark = f"{AUDIT_MARK}{next(self._numbers)}"
        before = self._audit_log.stat().st_size if self._audit_log.exists() else 0
        self.client.get(mark)
        self.wait_until(
            lambda: any(request["uri"] == mark for request in audit.parse(audit.read(self._audit_log, before))),
            "the audit log has the request",
        )
