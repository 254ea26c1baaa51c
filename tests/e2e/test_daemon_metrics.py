"""The daemon as a process on an API server: what it tells of its connection."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import re
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from multus_daemon.cluster.kube import csr
from tests.e2e.rights import Container
from tests.e2e.server_process import free_port
from tests.fakes.apiserver import FakeApiServer

NODE = "node-a"


def certificate(ends: datetime.datetime) -> bytes:
    """A certificate for the node, and its key, as the daemon keeps them."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = ((NameOID.ORGANIZATION_NAME, csr.ORGANIZATION), (NameOID.COMMON_NAME, csr.USER_PREFIX + NODE))
    subject = x509.Name([x509.NameAttribute(oid, value) for oid, value in names])
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ends - datetime.timedelta(days=2))
        .not_valid_after(ends)
        .sign(key, hashes.SHA256())
    )
    own = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return signed.public_bytes(serialization.Encoding.PEM) + own


@contextlib.asynccontextmanager
async def scraping(folder: Path, *writable: Path, **settings: object) -> AsyncIterator[Callable[[str], float | None]]:
    """A daemon with these settings, which can write to these directories.

    Yields what reads one of its metrics, None where it has no such sample.
    """
    port = free_port()
    own = {"socketDir": "run", "cniDir": "cni"}
    given = {key: str(folder / name) for key, name in own.items()} | {"cniConfigDir": ""}
    config = folder / "daemon-config.json"
    config.write_text(json.dumps(given | {"metricsPort": port, "metricsAddress": "127.0.0.1"} | settings))
    container = Container(folder)
    command = container.daemon(given, "--config", str(config), writable=writable)
    daemon = await asyncio.create_subprocess_exec(*command, env=os.environ | {"MULTUS_NODE_NAME": NODE})

    def read(sample: str) -> float | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        except OSError:
            return None
        found = re.search(rf"(?m)^{re.escape(sample)} (.+)$", text)
        return float(found[1]) if found else None

    try:
        yield read
    finally:
        daemon.terminate()
        await asyncio.wait_for(daemon.wait(), 20)
        container.__exit__()


async def until(read: Callable[[str], float | None], sample: str, holds: Callable[[float], bool]) -> None:
    """Wait until the sample is there and `holds`."""
    async with asyncio.timeout(20):
        while (value := await asyncio.to_thread(read, sample)) is None or not holds(value):
            await asyncio.sleep(0.05)


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    server = FakeApiServer()
    await server.start()
    yield server
    await server.stop()


async def test_it_tells_how_old_is_what_it_knows(server: FakeApiServer, tmp_path: Path) -> None:
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig")
    async with scraping(tmp_path, kubeconfig=str(kubeconfig)) as read:
        for resource in ("pods", "networks"):
            await until(read, f'multus_informer_stale_seconds{{resource="{resource}"}}', lambda age: age == 0)
        assert await asyncio.to_thread(read, "multus_client_certificate_expiration_timestamp_seconds") is None
        await server.stop()
        for resource in ("pods", "networks"):
            await until(read, f'multus_informer_stale_seconds{{resource="{resource}"}}', lambda age: 0 < age < 60)
        await server.start()
        for resource in ("pods", "networks"):
            await until(read, f'multus_informer_stale_seconds{{resource="{resource}"}}', lambda age: age == 0)


async def test_it_tells_when_its_certificate_ends(server: FakeApiServer, tmp_path: Path) -> None:
    ends = datetime.datetime.now(datetime.UTC).replace(microsecond=0) + datetime.timedelta(days=1)
    folder = tmp_path / "certificates"
    folder.mkdir()
    (folder / "multus-client-current.pem").write_bytes(certificate(ends))
    bootstrap = server.kubeconfig(tmp_path / "bootstrap")
    settings = {"enabled": True, "bootstrapKubeconfig": str(bootstrap), "certDir": str(folder), "certDuration": "48h"}
    # The component per-node-certificates mounts it.
    async with scraping(tmp_path, folder, perNodeCertificate=settings) as read:
        name = "multus_client_certificate_expiration_timestamp_seconds"
        await until(read, name, lambda moment: moment == ends.timestamp())
