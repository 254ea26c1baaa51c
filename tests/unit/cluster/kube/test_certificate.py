"""A node's certificate: had, kept, renewed; by a cluster in this file, on a clock that runs as fast as it can."""

import asyncio
import base64
import contextlib
import datetime
import itertools
import json
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from multus_daemon.cluster.kube import certificate, csr
from multus_daemon.cluster.kube.certificate import CertificateFiles, CertificateManager
from multus_daemon.cluster.kube.errors import KubeError, NoAnswerError
from multus_daemon.runtime import fs
from multus_daemon.runtime.gates import Gates
from multus_tools import approver
from tests import aside
from tests.virtual_time import in_virtual_time

BASE = datetime.datetime(2026, 11, 21, 6, tzinfo=datetime.UTC).timestamp()
MINUTE, HOUR = 60.0, 3600.0
START = 1000.0
"""The loop's clock at the beginning of a test."""


class ApiError(KubeError):
    def __init__(self, status: int, message: str = "") -> None:
        super().__init__(f"{status} {message}")
        self.status = status


class Cluster:
    """An API server, a signer and an approver; the time here is right."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.objects: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[float, str, str, str]] = []
        """When, who, method, path."""
        self.away: Exception | None = None
        self.approves: bool | str = True
        self.subject = "system:multus:n1"
        self.organization = "system:multus"
        self.issue: Callable[[bytes], bytes] = lambda chain: chain
        self.connections: list[Path | None] = []
        self.known: dict[Any, tuple[str, bool, float, float]] = {}
        self.slept = 0.0
        """Seconds that the machine, with its loop's clock, stood still."""

    @property
    def time(self) -> float:
        return BASE + self.slept + asyncio.get_running_loop().time() - START

    def sign(self, public_key: Any, common_name: str, seconds: float, *, key: Any = None, now: float = 0) -> bytes:
        now = now or self.time
        names = [(NameOID.ORGANIZATION_NAME, self.organization), (NameOID.COMMON_NAME, common_name)]
        with csr.long_names():
            subject = x509.Name([x509.NameAttribute(oid, value, _validate=False) for oid, value in names])
            certificate = (
                x509.CertificateBuilder()
                .subject_name(subject)
                .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ca")]))
                .public_key(public_key)
                .serial_number(x509.random_serial_number())
                .not_valid_before(datetime.datetime.fromtimestamp(now - 300, datetime.UTC))
                .not_valid_after(datetime.datetime.fromtimestamp(now + seconds, datetime.UTC))
                .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
                .sign(key or self.key, hashes.SHA256())
            )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def pair(self, seconds: float, common_name: str = "system:multus:n1", *, key: Any = None, now: float = 0) -> bytes:
        own = ec.generate_private_key(ec.SECP256R1())
        return self.sign(own.public_key(), common_name, seconds, key=key, now=now) + own.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def user(self, pem: bytes) -> str:
        """Return the user of the certificate; raise the API server's error if it does not accept the certificate."""
        if (self.key, pem) not in self.known:
            leaf = x509.load_pem_x509_certificate(pem)
            signed = True
            try:
                self.key.public_key().verify(leaf.signature, leaf.tbs_certificate_bytes, ec.ECDSA(hashes.SHA256()))
            except InvalidSignature:
                signed = False
            with csr.long_names():
                name = str(leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
            since, until = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
            self.known[self.key, pem] = (name, signed, since, until)
        name, signed, since, until = self.known[self.key, pem]
        if not signed or not since <= self.time < until:
            raise ApiError(401, "expired" if signed else "unknown authority")
        return name

    @contextlib.asynccontextmanager
    async def connect(self, path: Path | None) -> AsyncIterator[Any]:
        self.connections.append(path)
        yield Client(self, fs.read_limited(path) if path else None)

    def answer(self, user: str, method: str, path: str, body: bytes | None) -> Any:
        if path == "/version":
            return {"major": "1"}
        if method == "POST":
            found = json.loads(body or b"")
            name = found["metadata"]["name"]
            if name in self.objects:
                raise ApiError(409, "already exists")
            groups = ["system:nodes"] if user.startswith("system:node:") else ["system:multus"]
            found["spec"] |= {"username": user, "groups": [*groups, "system:authenticated"]}
            self.objects[name] = found
            return found
        name = path.rsplit("/", 1)[1]
        if name not in self.objects:
            raise ApiError(404, "not found")
        found = self.objects[name]
        if self.approves and "status" not in found:
            found["status"] = self.decide(found)
        return found

    def decide(self, found: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self.approves, str):
            return {"conditions": [{"type": "Denied", "status": "True", "reason": "No", "message": self.approves}]}
        request = x509.load_pem_x509_csr(base64.b64decode(found["spec"]["request"]))
        chain = self.issue(self.sign(request.public_key(), self.subject, found["spec"]["expirationSeconds"]))
        return {
            "conditions": [{"type": "Approved", "status": "True"}],
            "certificate": base64.b64encode(chain).decode(),
        }

    def posts(self) -> list[tuple[float, str]]:
        return [(when, user) for when, user, method, _ in self.requests if method == "POST"]


class Client:
    def __init__(self, cluster: Cluster, pem: bytes | None) -> None:
        self._cluster = cluster
        self._pem = pem

    async def request(self, method: str, path: str, *, body: bytes | None = None, **_: Any) -> bytes:
        cluster = self._cluster
        await asyncio.sleep(0.01)
        if cluster.away:
            raise cluster.away
        user = cluster.user(self._pem) if self._pem else "system:node:n1"
        cluster.requests.append((asyncio.get_running_loop().time(), user, method, path))
        return json.dumps(cluster.answer(user, method, path, body)).encode()


class Node:
    """A manager and what it shows."""

    def __init__(self, cluster: Cluster, directory: Path, *, name: str = "n1", seconds: int = 600) -> None:
        self.cluster = cluster
        self.directory = directory
        self.files = CertificateFiles(directory)
        self.gates = Gates("certificate")
        self.offset = 0.0
        """Seconds that the node's clock is ahead."""
        self.renewed: list[tuple[float, bytes]] = []
        self._before = b""
        self._gaps: list[float] = []
        self.manager = CertificateManager(
            node=name,
            files=self.files,
            connect=cluster.connect,
            on_renewed=self.on_renewed,
            gates=self.gates,
            seconds=seconds,
            now=lambda: cluster.time + self.offset,
            uptime=lambda: cluster.time,
        )

    def on_renewed(self) -> None:
        now = asyncio.get_running_loop().time()
        if not self._accepted(self._before):
            self._gaps.append(now)
        self._before = fs.read_limited(self.files.current)
        self.renewed.append((now, self._before))

    def accepted(self) -> bool:
        """Return whether the API server accepts the certificate in the file."""
        return self.files.current.exists() and self._accepted(fs.read_limited(self.files.current))

    def _accepted(self, pem: bytes) -> bool:
        try:
            self.cluster.user(pem)
        except (ApiError, ValueError):
            return False
        return True

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with aside.running(self.manager.run()) as task:
            yield
            assert not task.done()

    @contextlib.asynccontextmanager
    async def usable(self, seconds: float | None = None) -> AsyncIterator[None]:
        """The manager runs in the block, and has had a certificate within `seconds`."""
        async with self.running():
            await asyncio.wait_for(self.manager.usable(), seconds)
            yield

    async def gaps(self, seconds: float) -> list[float]:
        """Wait, and return when the API server did not accept the certificate in the file.

        It is looked at twice a minute and at the moment when another replaces it. So no gap is too short to be seen.
        """
        self._gaps, self._before = [], fs.read_limited(self.files.current)
        for _ in range(int(seconds / 30)):
            await asyncio.sleep(30)
            if not self.accepted():
                self._gaps.append(asyncio.get_running_loop().time())
        return self._gaps


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "certs"


@pytest.fixture
def node(cluster: Cluster, directory: Path) -> Node:
    return Node(cluster, directory)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def put(directory: Path, pem: bytes, name: str = "multus-client-current.pem") -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(pem)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- the first one ---------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_the_first_certificate(cluster: Cluster, node: Node, directory: Path) -> None:
    assert "missing" in node.manager.problem
    async with node.running():
        path = await asyncio.wait_for(node.manager.usable(), 5)
        await asyncio.sleep(1)
    assert path == directory / "multus-client-current.pem"
    assert node.gates.closed == {}
    assert node.manager.problem == ""
    assert node.manager.expires == pytest.approx(cluster.time + 600, abs=5)
    assert len(node.renewed) == 1
    pem = node.renewed[0][1]
    leaf = x509.load_pem_x509_certificate(pem)
    key = serialization.load_pem_private_key(pem, None)
    assert leaf.public_key() == key.public_key()
    assert leaf.subject.rfc4514_string() == "CN=system:multus:n1,O=system:multus"
    # The order and the kind of key that client-go's file store writes.
    assert pem.index(b"-----BEGIN CERTIFICATE-----") == 0
    assert pem.count(b"-----BEGIN EC PRIVATE KEY-----") == 1


@in_virtual_time
async def test_what_is_asked_for(cluster: Cluster, node: Node) -> None:
    async with node.usable():
        (found,) = cluster.objects.values()
    assert (found["apiVersion"], found["kind"]) == ("certificates.k8s.io/v1", "CertificateSigningRequest")
    assert found["metadata"]["name"].startswith("multus-")
    assert len(found["metadata"]["name"]) == 47
    spec = found["spec"]
    assert spec["signerName"] == "kubernetes.io/kube-apiserver-client"
    assert sorted(spec["usages"]) == ["client auth", "digital signature"]
    assert spec["expirationSeconds"] == 600
    request = x509.load_pem_x509_csr(base64.b64decode(spec["request"]))
    assert request.is_signature_valid
    assert request.subject.rfc4514_string() == "CN=system:multus:n1,O=system:multus"
    assert isinstance(request.public_key(), ec.EllipticCurvePublicKey)
    assert cluster.posts()[0][1] == "system:node:n1"


@pytest.mark.parametrize(
    "name", ["n1", "gke-a-cluster-with-a-long-name-pool-1-0123abcd-xyz1.europe-west1-b.c.project.internal"]
)
@in_virtual_time
async def test_our_own_approver_approves_it(cluster: Cluster, directory: Path, name: str) -> None:
    cluster.subject = f"system:multus:{name}"
    node = Node(cluster, directory, name=name)
    async with node.usable():
        (found,) = cluster.objects.values()
    del found["status"]
    found["spec"]["username"] = f"system:node:{name}"
    judged = approver.judge(msgspec.convert(found, csr.CertificateSigningRequest))
    assert judged
    assert judged.type == "Approved"


@pytest.mark.usefixtures("open_umask")
@in_virtual_time
async def test_only_root_can_read_the_files(cluster: Cluster, node: Node, directory: Path) -> None:
    cluster.approves = False
    async with node.running():
        await asyncio.sleep(5)
        assert mode(directory) == 0o700
        assert {path.name: mode(path) for path in directory.iterdir()} == {"multus-client-pending.key": 0o600}
        cluster.approves = True
        await node.manager.usable()
        await asyncio.sleep(1)
    files = sorted(directory.iterdir())
    assert [path.is_symlink() for path in files] == [False, True]
    assert {mode(path) for path in files} == {0o600}


# --- renewal ---------------------------------------------------------------------------------------------------------


@pytest.mark.conformance("programs-25")
@in_virtual_time
async def test_hours_without_a_gap(cluster: Cluster, node: Node, directory: Path) -> None:
    async with node.usable():
        assert await node.gaps(3 * HOUR) == []
        assert node.gates.closed == {}
    posts = cluster.posts()
    # All but the first with the certificate that is about to end.
    assert [user for _, user in posts[:3]] == ["system:node:n1", "system:multus:n1", "system:multus:n1"]
    assert {user for _, user in posts[1:]} == {"system:multus:n1"}
    # 70 to 90 % of the 15 minutes that such a certificate has, of which 5 are over when it is issued.
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(posts)]
    assert min(gaps) > 5.4 * MINUTE
    assert max(gaps) < 8.6 * MINUTE
    assert max(gaps) - min(gaps) > MINUTE
    # The client is told once for each, when the file is there; every key is new.
    assert len(node.renewed) == len(posts) == len(cluster.objects)
    assert len({pem for _, pem in node.renewed}) == len(posts)
    # The link, its target, and the one before.
    assert len(list(directory.iterdir())) == 3


@in_virtual_time
async def test_the_certificate_in_use_stays_while_the_next_is_awaited(cluster: Cluster, node: Node) -> None:
    async with node.usable():
        first = fs.read_limited(node.files.current)
        cluster.approves = False
        await asyncio.sleep(8.6 * MINUTE)
        assert len(cluster.posts()) >= 2
        assert fs.read_limited(node.files.current) == first
        assert len(node.renewed) == 1
        assert node.accepted()
        assert node.gates.closed == {}
        cluster.approves = True
        assert await node.gaps(MINUTE) == []
        assert len(node.renewed) == 2
    assert len(cluster.objects) == 2


@in_virtual_time
async def test_an_approver_that_takes_twenty_minutes(cluster: Cluster, node: Node) -> None:
    """A person with kubectl, for one: the request is the same all the time."""
    cluster.approves = False
    async with node.running():
        await asyncio.sleep(20 * MINUTE)
        assert "cert-approver" in node.gates.closed["certificate"]
        cluster.approves = True
        await asyncio.wait_for(node.manager.usable(), 60)
    assert len(cluster.objects) == 1


@in_virtual_time
async def test_a_request_that_the_cluster_has_forgotten_is_made_again(cluster: Cluster, node: Node) -> None:
    cluster.approves = False
    async with node.running():
        await asyncio.sleep(MINUTE)
        cluster.objects.clear()
        await asyncio.sleep(MINUTE)
        assert len(cluster.objects) == 1
        cluster.approves = True
        await asyncio.wait_for(node.manager.usable(), 60)


@in_virtual_time
async def test_denied(cluster: Cluster, node: Node) -> None:
    cluster.approves = "not this\nnode"
    async with node.running():
        await asyncio.sleep(10 * MINUTE)
        closed = node.gates.closed["certificate"]
        assert "n1 is missing" in closed
        assert "denied: No: not this\nnode" in closed
        # Each with a key of its own, and not many.
        assert 3 <= len(cluster.objects) <= 8
        cluster.approves = True
        await asyncio.wait_for(node.manager.usable(), 360)
        assert node.gates.closed == {}


@pytest.mark.parametrize("error", [NoAnswerError("connection refused"), ApiError(500), ApiError(429)])
@in_virtual_time
async def test_the_api_server_away_beyond_the_end(cluster: Cluster, node: Node, error: Exception) -> None:
    async with node.usable():
        await asyncio.sleep(MINUTE)
        cluster.away = error
        await asyncio.sleep(HOUR)
        assert "is expired" in node.gates.closed["certificate"]
        assert str(error) in node.manager.problem
        cluster.away = None
        before = len(cluster.posts())
        await asyncio.sleep(45)
        assert node.accepted()
        assert node.gates.closed == {}
        # The old one has expired: it is with the bootstrap credentials.
        assert cluster.posts()[before][1] == "system:node:n1"


@in_virtual_time
async def test_the_api_server_away_around_the_time_of_renewal(cluster: Cluster, node: Node) -> None:
    async with node.usable():
        await asyncio.sleep(5 * MINUTE)
        cluster.away = NoAnswerError("connection refused")
        await asyncio.sleep(4 * MINUTE)
        assert node.gates.closed == {}
        cluster.away = None
        assert await node.gaps(HOUR) == []


@in_virtual_time
async def test_a_certificate_authority_that_is_exchanged(cluster: Cluster, node: Node) -> None:
    """The client gets 401 and says so; the bootstrap kubeconfig is read again."""
    async with node.usable():
        await asyncio.sleep(75)
        cluster.key = ec.generate_private_key(ec.SECP256R1())
        node.manager.rejected()
        assert "refused" in node.gates.closed["certificate"]
        await asyncio.sleep(2)
        assert node.accepted()
        assert node.gates.closed == {}
        # A late rejection is about the previous certificate.
        node.manager.rejected()
        assert node.gates.closed == {}
        await asyncio.sleep(5)
    assert [user for _, user in cluster.posts()] == ["system:node:n1", "system:node:n1"]
    assert cluster.connections.count(None) == 2


@in_virtual_time
async def test_a_certificate_that_is_refused_when_it_is_to_be_renewed(cluster: Cluster, node: Node) -> None:
    async with node.usable():
        await asyncio.sleep(75)
        cluster.key = ec.generate_private_key(ec.SECP256R1())
        await asyncio.sleep(8.6 * MINUTE - 75)
        assert node.accepted()
    assert [user for _, user in cluster.posts()] == ["system:node:n1", "system:node:n1"]


@in_virtual_time
async def test_a_certificate_that_is_refused_beside_refused_bootstrap_credentials(cluster: Cluster, node: Node) -> None:
    async with node.usable():
        await asyncio.sleep(75)
        cluster.away = ApiError(401)
        await asyncio.sleep(9 * MINUTE - 75)
        assert "refused" in node.gates.closed["certificate"]


@in_virtual_time
async def test_rejections_again_and_again_make_no_storm(cluster: Cluster, node: Node) -> None:
    async with node.usable():
        await asyncio.sleep(MINUTE)
        cluster.away = ApiError(401)
        before = len(cluster.connections)
        for _ in range(600):
            node.manager.rejected()
            await asyncio.sleep(0.1)
        assert len(cluster.connections) - before < 10


@in_virtual_time
async def test_another_certificate_than_the_one_asked_for(cluster: Cluster, node: Node) -> None:
    other = cluster.sign(ec.generate_private_key(ec.SECP256R1()).public_key(), "system:multus:n1", 600, now=BASE)
    cluster.issue = lambda chain: other
    async with node.running():
        await asyncio.sleep(10)
        assert "the key is not the certificate's" in node.gates.closed["certificate"]
        cluster.issue = lambda chain: b"nonsense"
        await asyncio.sleep(60)
        assert "not a certificate" in node.gates.closed["certificate"]
        assert not node.files.current.exists()
        cluster.issue = lambda chain: chain.rstrip() + b"\n" + other.rstrip()
        await asyncio.wait_for(node.manager.usable(), 60)
        pem = fs.read_limited(node.files.current)
        assert len(x509.load_pem_x509_certificates(pem)) == 2
        # Go reads no PEM block that begins within a line.
        assert b"-----END CERTIFICATE-----\n-----BEGIN EC" in pem


@in_virtual_time
async def test_a_full_disk(cluster: Cluster, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    write = fs.write_atomic

    def full(path: Path, data: bytes, **options: Any) -> None:
        if path.suffix == ".pem":
            raise OSError(28, "No space left on device", str(path))
        write(path, data, **options)

    async with node.running():
        monkeypatch.setattr(fs, "write_atomic", full)
        await asyncio.sleep(20)
        assert "No space left" in node.gates.closed["certificate"]
        assert node.renewed == []
        monkeypatch.setattr(fs, "write_atomic", write)
        await asyncio.wait_for(node.manager.usable(), 60)
    assert len(cluster.objects) == 1


# --- start -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_crash_between_the_request_and_the_certificate(cluster: Cluster, node: Node, directory: Path) -> None:
    second = Node(cluster, directory)
    cluster.approves = False
    async with node.running():
        await asyncio.sleep(3)
    cluster.approves = True
    async with second.usable(1):
        await asyncio.sleep(1)
        assert len(second.renewed) == 1
        assert second.accepted()
    assert len(cluster.objects) == 1


@in_virtual_time
async def test_a_request_whose_certificate_lay_there_too_long(cluster: Cluster, node: Node, directory: Path) -> None:
    second = Node(cluster, directory)
    cluster.approves = False
    async with node.running():
        await asyncio.sleep(3)
    (found,) = cluster.objects.values()
    cluster.approves = True
    found["status"] = cluster.decide(found)
    await asyncio.sleep(30 * MINUTE)
    async with second.usable(5):
        await asyncio.sleep(1)
        assert second.accepted()
        # The old one was never put in place.
        assert len(second.renewed) == 1
    assert len(cluster.objects) == 2


@in_virtual_time
async def test_a_crash_right_after_the_file_was_written(cluster: Cluster, node: Node, directory: Path) -> None:
    second = Node(cluster, directory)
    async with node.usable():
        key = fs.read_limited(node.files.current)
    fs.write_atomic(directory / "multus-client-pending.key", key[key.index(b"-----BEGIN EC") :])
    async with second.usable(1):
        assert await second.gaps(HOUR) == []


@in_virtual_time
async def test_a_good_file_is_used_at_once(cluster: Cluster, node: Node, directory: Path) -> None:
    """The file is an absolute link to a dated file, as client-go leaves it."""
    dated = directory / "multus-client-2026-11-20-06-00-00.pem"
    put(directory, cluster.pair(HOUR, now=BASE), dated.name)
    put(directory, b"old", "multus-client-2026-11-19-06-00-00.pem")
    put(directory, b"other", "other-2026-11-19-06-00-00.pem")
    (directory / "multus-client-current.pem").symlink_to(dated)
    async with node.usable(1):
        await asyncio.sleep(30 * MINUTE)
        assert cluster.posts() == []
        assert node.renewed == []
        assert await node.gaps(HOUR) == []
    assert {user for _, user in cluster.posts()} == {"system:multus:n1"}
    current = directory / "multus-client-current.pem"
    assert current.is_symlink()
    names = sorted(path.name for path in directory.iterdir())
    assert "other-2026-11-19-06-00-00.pem" in names
    assert "multus-client-2026-11-19-06-00-00.pem" not in names
    assert os.readlink(current) in names


@in_virtual_time
async def test_a_good_file_and_no_api_server(cluster: Cluster, node: Node, directory: Path) -> None:
    put(directory, cluster.pair(HOUR, now=BASE))
    cluster.away = NoAnswerError("connection refused")
    async with node.usable(1):
        assert node.gates.closed == {}


def expired(cluster: Cluster) -> bytes:
    return cluster.pair(600, now=BASE - HOUR)


def of_another_node(cluster: Cluster) -> bytes:
    return cluster.pair(HOUR, "system:multus:n2", now=BASE)


def of_the_kubelet(cluster: Cluster) -> bytes:
    return cluster.pair(HOUR, "system:node:n1", now=BASE)


def of_another_group(cluster: Cluster) -> bytes:
    cluster.organization = "system:masters"
    pem = cluster.pair(HOUR, now=BASE)
    cluster.organization = "system:multus"
    return pem


def of_another_cluster(cluster: Cluster) -> bytes:
    return cluster.pair(HOUR, key=ec.generate_private_key(ec.SECP256R1()), now=BASE)


def with_another_key(cluster: Cluster) -> bytes:
    first, second = cluster.pair(HOUR, now=BASE), cluster.pair(HOUR, now=BASE)
    return first[: first.index(b"-----BEGIN PRIVATE")] + second[second.index(b"-----BEGIN PRIVATE") :]


def without_a_key(cluster: Cluster) -> bytes:
    pem = cluster.pair(HOUR, now=BASE)
    return pem[: pem.index(b"-----BEGIN PRIVATE")]


def cut_off(cluster: Cluster) -> bytes:
    return cluster.pair(HOUR, now=BASE)[:200]


@pytest.mark.parametrize(
    "content",
    [
        expired,
        of_another_node,
        of_the_kubelet,
        of_another_group,
        of_another_cluster,
        with_another_key,
        without_a_key,
        cut_off,
        lambda _: b"",
        lambda _: b"\0" * 100,
        lambda _: b"x" * (certificate.FILE_MAX_BYTES + 1),
    ],
)
@in_virtual_time
async def test_a_file_that_can_not_be_used(
    cluster: Cluster, node: Node, directory: Path, content: Callable[[Cluster], bytes]
) -> None:
    put(directory, content(cluster))
    put(directory, b"no key", "multus-client-pending.key")
    async with node.usable(2):
        await asyncio.sleep(1)
        assert node.accepted()
        assert len(node.renewed) == 1
    assert [user for _, user in cluster.posts()] == ["system:node:n1"]
    assert (directory / "multus-client-current.pem").is_symlink()


@in_virtual_time
async def test_a_dangling_link_and_leftovers_of_killed_writers(cluster: Cluster, node: Node, directory: Path) -> None:
    directory.mkdir()
    (directory / "multus-client-current.pem").symlink_to("multus-client-2026-01-01-00-00-00.pem")
    leftover = directory / ".multus-client-current.pem.4194999-0123456789ab"
    leftover.symlink_to("x")
    async with node.usable(2):
        assert node.accepted()
    assert not leftover.is_symlink()


@in_virtual_time
async def test_a_directory_that_can_not_be_made_now(cluster: Cluster, node: Node, directory: Path) -> None:
    directory.write_text("a file")
    async with node.running():
        await asyncio.sleep(10)
        assert str(directory) in node.gates.closed["certificate"]
        directory.unlink()
        await asyncio.wait_for(node.manager.usable(), 60)


@in_virtual_time
async def test_an_rsa_pair_of_an_earlier_release_is_used(cluster: Cluster, directory: Path, node: Node) -> None:
    own = rsa.generate_private_key(65537, 2048)
    pem = cluster.sign(own.public_key(), "system:multus:n1", HOUR, now=BASE) + own.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    put(directory, pem)
    async with node.usable(1):
        assert cluster.posts() == []


# --- clocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-86400.0, -600.0, 420.0, 86400.0])
@in_virtual_time
async def test_a_clock_that_jumps(cluster: Cluster, node: Node, jump: float) -> None:
    async with node.usable():
        await asyncio.sleep(MINUTE)
        node.offset = jump
        assert await node.gaps(HOUR) == []
        node.offset = 0
        assert await node.gaps(HOUR) == []
    # Once every five to nine minutes, and no storm.
    assert 10 < len(cluster.posts()) < 40


@pytest.mark.parametrize("wrong", [-50 * 365 * 86400.0, -86400.0, -240.0, 240.0, 570.0, 86400.0])
@in_virtual_time
async def test_a_clock_that_is_wrong_from_the_beginning(cluster: Cluster, node: Node, wrong: float) -> None:
    node.offset = wrong
    async with node.usable(5):
        assert await node.gaps(HOUR) == []
        assert node.gates.closed == {}
    assert len(cluster.posts()) < 23


@in_virtual_time
async def test_a_file_that_is_not_valid_yet_is_renewed_at_once(cluster: Cluster, node: Node, directory: Path) -> None:
    """The clock of this node runs late, so the API server is asked rather than believed to be wrong."""
    put(directory, cluster.pair(HOUR, now=BASE))
    node.offset = -86400
    async with node.usable(1):
        await asyncio.sleep(5)
        assert len(node.renewed) == 1
    assert [user for _, user in cluster.posts()] == ["system:multus:n1"]


@in_virtual_time
async def test_a_machine_that_slept(cluster: Cluster, node: Node) -> None:
    """The loop's clock stands still in a suspend, the clock since boot does not."""
    async with node.usable():
        await asyncio.sleep(MINUTE)
        cluster.slept = HOUR
        assert not node.accepted()
        await asyncio.sleep(certificate.CLOCK_SECONDS + 5)
        assert node.accepted()
        assert node.gates.closed == {}
    assert cluster.posts()[-1][1] == "system:node:n1"
