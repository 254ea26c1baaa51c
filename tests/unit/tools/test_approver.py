"""Check which requests get a per-node certificate, and how the verdict reaches the API server."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from multus_daemon.cluster.kube import informer
from multus_daemon.cluster.kube.csr import CSR_PATH, CertificateSigningRequest, Condition, long_names
from multus_daemon.cluster.kube.errors import KubeError, NoAnswerError
from multus_tools import approver
from multus_tools.approver import Approver, judge
from tests.aside import running
from tests.waiting import eventually

KEY = ec.generate_private_key(ec.SECP256R1())
ORG, CN, OU = NameOID.ORGANIZATION_NAME, NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME
OWN = ((ORG, "system:multus"), (CN, "system:multus:n1"))
NODE = {"username": "system:node:n1", "groups": ["system:nodes", "system:authenticated"]}
MULTUS: dict[str, Any] = {"username": "system:multus:n1", "groups": ["system:multus", "system:authenticated"]}


def pem(
    subject: tuple[tuple[x509.ObjectIdentifier, str], ...] = OWN,
    *extensions: x509.ExtensionType,
    key: Any = KEY,
) -> bytes:
    with long_names():
        name = x509.Name([x509.NameAttribute(oid, value, _validate=False) for oid, value in subject])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def csr(request: bytes | None = b"", *, status: Any = None, name: str = "r", **spec: Any) -> dict[str, Any]:
    """A CertificateSigningRequest as the API has it; `None` leaves a key out."""
    full = {
        "request": None if request is None else base64.b64encode(request or pem()).decode(),
        "signerName": "kubernetes.io/kube-apiserver-client",
        "usages": ["digital signature", "client auth"],
        "expirationSeconds": 600,
        **NODE,
        **spec,
    }
    spec = {key: value for key, value in full.items() if value is not None}
    metadata = {"name": name, "resourceVersion": "7", "labels": {"kept": "yes"}}
    return {"metadata": metadata, "spec": spec, "status": status or {}}


def verdict(found: dict[str, Any]) -> Condition | None:
    return judge(msgspec.convert(found, CertificateSigningRequest))


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(csr(), id="the kubelet's identity"),
        pytest.param(csr(**MULTUS), id="the certificate that is about to end"),
        pytest.param(csr(usages=["client auth", "digital signature"]), id="usages in another order"),
        pytest.param(csr(usages=["client auth", "digital signature", "client auth"]), id="a usage twice"),
        pytest.param(csr(expirationSeconds=365 * 86400), id="365 days"),
        pytest.param(csr(groups=None), id="no groups"),
        pytest.param(csr(pem(((CN, "system:multus:n1"), (ORG, "system:multus")))), id="subject in another order"),
        pytest.param(csr(pem(key=rsa.generate_private_key(65537, 2048))), id="an RSA key"),
        pytest.param(csr(extra={"authentication.kubernetes.io/credential-id": ["x"]}), id="what the API server adds"),
    ],
)
def test_approved(found: dict[str, Any]) -> None:
    assert verdict(found) == Condition("Approved", "True", "AutoApproved", "r is node n1's own")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        # who asks
        pytest.param(csr(username="kubernetes-admin"), "requester", id="a person"),
        pytest.param(csr(username="system:serviceaccount:kube-system:multus"), "requester", id="a service account"),
        pytest.param(csr(username=None), "requester", id="nobody"),
        pytest.param(csr(username="system:node:"), "requester", id="a node without a name"),
        pytest.param(csr(username="system:nodes:n1"), "requester", id="nearly a node"),
        pytest.param(csr(username="x system:node:n1"), "requester", id="a node at the end"),
        pytest.param(csr(username="system:node:n1\n"), "requester", id="a newline behind the requester"),
        pytest.param(csr(username="system:node:N1"), "requester", id="upper case"),
        pytest.param(csr(username="system:node:n1:n2"), "requester", id="a colon in the node's name"),
        pytest.param(csr(username="system:node:" + "a" * 254), "requester", id="too long a node name"),
        pytest.param(csr(groups=["system:nodes", "system:masters"]), "groups", id="a requester of another group"),
        pytest.param(csr(groups=["system:nodes", "evil\n"]), r"evil\\n", id="a group with a newline"),
        # certificate subject
        pytest.param(csr(username="system:node:n2"), "common name", id="another node's certificate"),
        pytest.param(csr(**{**MULTUS, "username": "system:multus:n2"}), "common name", id="another node's, renewed"),
        pytest.param(csr(pem((OWN[0], (CN, "system:multus")))), "common name", id="no node in it"),
        pytest.param(csr(pem((OWN[0], (CN, "system:multus-admin")))), "common name", id="the prefix only"),
        pytest.param(csr(pem((OWN[0], (CN, "system:multus:n1\n")))), r"n1\\n", id="a newline in the common name"),
        pytest.param(csr(pem((OWN[0], (CN, "system:multus:n\u0661")))), r"u0661", id="an Arabic digit"),
        pytest.param(csr(pem((OWN[0], (CN, "system:multus:n1\u200b")))), r"u200b", id="a zero-width space"),
        pytest.param(csr(pem((OWN[0], (CN, "system:multus:n1\0x")))), r"x00x", id="a NUL"),
        pytest.param(csr(pem((*OWN, (CN, "kubernetes-admin")))), "common name", id="a second common name"),
        pytest.param(csr(pem(((CN, "kubernetes-admin"), *OWN))), "common name", id="a first common name"),
        pytest.param(csr(pem((*OWN, (ORG, "system:masters")))), "organization", id="a second organization"),
        pytest.param(csr(pem(((ORG, "system:masters"), OWN[1]))), "organization", id="another organization"),
        pytest.param(csr(pem((OWN[1],))), "organization", id="no organization"),
        pytest.param(csr(pem((*OWN, (OU, "x")))), "more than", id="an organizational unit"),
        # what for
        pytest.param(csr(usages=["client auth"]), "usages", id="a usage less"),
        pytest.param(csr(usages=["digital signature", "client auth", "server auth"]), "usages", id="a usage more"),
        pytest.param(csr(usages=None), "usages", id="no usages"),
        pytest.param(csr(expirationSeconds=None), "missing", id="no expiration"),
        pytest.param(csr(expirationSeconds=365 * 86400 + 1), "365 days", id="more than a year"),
        pytest.param(csr(expirationSeconds=0), "expirationSeconds", id="no time"),
        pytest.param(csr(expirationSeconds=-600), "expirationSeconds", id="a negative time"),
        pytest.param(
            csr(pem(OWN, x509.SubjectAlternativeName([x509.DNSName("kubernetes.default")]))), "other names", id="a SAN"
        ),
        pytest.param(csr(pem(OWN, x509.BasicConstraints(ca=True, path_length=None))), "extensions", id="a CA"),
    ],
)
def test_denied(found: dict[str, Any], reason: str) -> None:
    judged = verdict(found)
    assert judged
    assert (judged.type, judged.status, judged.reason) == ("Denied", "True", "CSRDenied")
    assert reason.replace("\\\\", "\\") in judged.message
    assert judged.message.isprintable()
    assert judged.message.isascii()


def test_a_request_that_its_key_did_not_sign_is_denied() -> None:
    request = bytearray(x509.load_pem_x509_csr(pem()).public_bytes(serialization.Encoding.DER))
    request[request.index(b"system:multus:n1") + 15] = ord("2")
    lines = base64.encodebytes(bytes(request))
    forged = b"-----BEGIN CERTIFICATE REQUEST-----\n" + lines + b"-----END CERTIFICATE REQUEST-----\n"
    judged = verdict(csr(forged, username="system:node:n2"))
    assert judged
    assert (judged.type, judged.message) == ("Denied", "its signature is not that of its key")


DECIDED = [{"type": "Approved", "status": "True"}]


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(csr(signerName="kubernetes.io/kubelet-serving"), id="another signer"),
        pytest.param(csr(signerName=None), id="no signer"),
        pytest.param(csr(pem((OWN[0], (CN, "system:node:n1")))), id="another name"),
        pytest.param(csr(pem((OWN[0], (CN, " system:multus:n1")))), id="a space before the name"),
        pytest.param(csr(pem((OWN[0], (CN, "System:multus:n1")))), id="upper case"),
        pytest.param(csr(pem((OWN[0],))), id="no name"),
        pytest.param(csr(status={"conditions": DECIDED}), id="approved"),
        pytest.param(csr(status={"conditions": [{"type": "Denied", "status": "True"}]}), id="denied"),
        pytest.param(csr(status={"conditions": [{"type": "Failed", "status": "True"}]}), id="failed"),
        pytest.param(csr(status={"certificate": base64.b64encode(b"x").decode()}), id="issued"),
        pytest.param(csr(b"\0\xff"), id="no PEM"),
        pytest.param(
            csr(b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"), id="no DER"
        ),
        # Input that Go's PEM reader and this one might read differently is refused.
        pytest.param(csr(pem() + pem()), id="two blocks"),
        pytest.param(csr(b"-----BEGIN X-----\n" + pem()), id="half a block before"),
        pytest.param(csr(b"text\n" + pem()), id="text before"),
        pytest.param(csr(pem() + b"text\n"), id="text behind"),
        pytest.param(csr(pem().replace(b"REQUEST-----\n", b"REQUEST-----\nA: b\n\n", 1)), id="a PEM header"),
    ],
)
def test_ignored(found: dict[str, Any]) -> None:
    assert verdict(found) is None


# --- the loop --------------------------------------------------------------------------------------------------------


class ApiError(KubeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Api:
    """An API server with CertificateSigningRequests; `errors` are raised by the requests to come, in order."""

    def __init__(self, *found: dict[str, Any]) -> None:
        self.objects = {item["metadata"]["name"]: item for item in found}
        self.requests: list[tuple[str, str]] = []
        self.queries: list[Mapping[str, str]] = []
        self.errors: list[Exception | None] = []
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.before_put: Callable[[], None] = lambda: None

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: float = 30,
    ) -> bytes:
        self.requests.append((method, path.removeprefix(CSR_PATH)))
        if self.errors and (error := self.errors.pop(0)):
            raise error
        if path == CSR_PATH:
            self.queries.append(dict(query or {}))
            return json.dumps({"metadata": {"resourceVersion": "41"}, "items": list(self.objects.values())}).encode()
        name = path.removeprefix(CSR_PATH).split("/")[1]
        if name not in self.objects:
            raise ApiError(404)
        if method == "PUT":
            self.before_put()
            new = json.loads(body or b"")
            if new["metadata"]["resourceVersion"] != self.objects[name]["metadata"]["resourceVersion"]:
                raise ApiError(409)
            self.objects[name] = new
            self.events.put_nowait({"type": "MODIFIED", "object": new})
        return json.dumps(self.objects[name]).encode()

    async def lines(
        self, path: str, query: Mapping[str, str], *, inactivity: float, on_open: Callable[[], None]
    ) -> AsyncGenerator[bytes, None]:
        assert path == CSR_PATH
        self.queries.append(dict(query))
        on_open()
        while True:
            yield json.dumps(await self.events.get()).encode()

    async def turn(self) -> None:
        """A request that repeats a failed one has no pause but its sender's."""

    def add(self, found: dict[str, Any]) -> None:
        """Make an object while the watch is open."""
        self.objects[found["metadata"]["name"]] = found
        self.events.put_nowait({"type": "ADDED", "object": found})

    def conditions(self, name: str = "r") -> list[tuple[str, str]]:
        return [(item["type"], item["status"]) for item in self.objects[name]["status"].get("conditions", [])]

    @property
    def puts(self) -> list[str]:
        return [path for method, path in self.requests if method == "PUT"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer, "RETRY_SECONDS", (0.01, 0.05))
    monkeypatch.setattr(approver, "RETRY_SECONDS", (0.01, 0.05))


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    """An API server, and the approver that watches it."""
    served = Api()
    async with running(Approver(served).run()):  # type: ignore[arg-type]  # the part of a client that it uses
        await eventually(lambda: len(served.queries) == 2)
        yield served


async def decided(served: Any, name: str = "r") -> None:
    """Run an approver until the request has a verdict."""
    async with running(Approver(served).run()):
        await eventually(lambda: served.conditions(name))


async def test_what_is_there_already_is_decided() -> None:
    api = Api(csr(name="other", signerName="x/y"), csr(name="bad", username="someone"), csr(name="good"))
    await decided(api, "good")
    assert api.conditions("good") == [("Approved", "True")]
    assert api.conditions("bad") == [("Denied", "True")]
    assert api.conditions("other") == []
    assert sorted(api.puts) == ["/bad/approval", "/good/approval"]


async def test_the_whole_object_is_sent_back_with_one_condition_more(api: Api) -> None:
    api.add(csr())
    before = json.loads(json.dumps(api.objects["r"]))
    await eventually(api.conditions)
    after = api.objects["r"]
    assert after["metadata"] == before["metadata"]
    assert after["spec"] == before["spec"]
    assert (after["apiVersion"], after["kind"]) == ("certificates.k8s.io/v1", "CertificateSigningRequest")
    (condition,) = after["status"]["conditions"]
    assert condition == {
        "type": "Approved",
        "status": "True",
        "reason": "AutoApproved",
        "message": "r is node n1's own",
    }


async def test_what_comes_later_is_decided_once(api: Api) -> None:
    api.events.put_nowait({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "50"}}})
    api.events.put_nowait({"type": "DELETED", "object": csr(name="gone")})
    api.add(csr(name="new"))
    api.add(csr(name="changed", signerName="x/y"))
    api.add(csr(name="changed", **MULTUS))
    await eventually(lambda: api.conditions("new") and api.conditions("changed"))
    assert api.conditions("new") == api.conditions("changed") == [("Approved", "True")]
    # Its own changes come back by the watch.
    await eventually(api.events.empty)
    assert sorted(api.puts) == ["/changed/approval", "/new/approval"]


async def test_only_the_signers_requests_are_watched_from_where_the_list_ended(api: Api) -> None:
    selector = "spec.signerName=kubernetes.io/kube-apiserver-client"
    assert [query["fieldSelector"] for query in api.queries] == [selector, selector]
    assert api.queries[1].items() >= {"watch": "true", "resourceVersion": "41"}.items()


async def test_an_error_event_lists_again(api: Api) -> None:
    api.objects["late"] = csr(name="late")
    api.events.put_nowait({"type": "ERROR", "object": {"code": 410, "message": "too old"}})
    await eventually(lambda: api.conditions("late"))


async def test_a_conflict_is_judged_again(api: Api) -> None:
    def someone_denies() -> None:
        api.objects["r"] = csr(status={"conditions": [{"type": "Denied", "status": "True"}]})
        api.objects["r"]["metadata"]["resourceVersion"] = "8"

    api.before_put = someone_denies
    api.add(csr())
    await eventually(lambda: [method for method, path in api.requests if path] == ["GET", "PUT", "GET"])
    assert api.conditions() == [("Denied", "True")]


async def test_it_is_tried_until_it_works(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    failures = 7

    def unwritable() -> None:
        if len(api.puts) <= failures:
            raise ApiError(500)

    api.before_put = unwritable
    api.add(csr())
    await eventually(api.conditions)
    assert api.conditions() == [("Approved", "True")]
    assert len(api.puts) == failures + 1
    assert caplog.text.count("next attempt in") == failures


async def test_one_that_is_gone_is_done(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    api.events.put_nowait({"type": "ADDED", "object": csr(name="gone")})
    await eventually(lambda: ("GET", "/gone") in api.requests)
    api.add(csr())
    await eventually(api.conditions)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert api.puts == ["/r/approval"]


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"spec": None},
        {"metadata": {"name": 5}},
        csr(usages="client auth"),
        csr(request=None),
        {"spec": {"request": "%"}},
    ],
)
async def test_a_misshapen_object_stops_nobody(api: Api, found: dict[str, Any]) -> None:
    api.events.put_nowait({"type": "ADDED", "object": found})
    api.add(csr(name="good"))
    await eventually(lambda: api.conditions("good"))
    assert api.puts == ["/good/approval"]


async def test_run_goes_on_through_an_api_server_that_is_away() -> None:
    api = Api(csr())
    api.errors = [NoAnswerError("connection refused"), ApiError(503), ApiError(403)]
    await decided(api)
    assert api.conditions() == [("Approved", "True")]
