"""Durations of certificates, and the answer to a request for one."""

import json

import pytest

from multus_daemon.cluster.kube import csr


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10m", 600),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("+24h", 86400),
        ("-1m", -60),
        ("0", 0),
        (".5s", 0.5),
        ("1.s", 1),
        ("100ms", 0.1),
        ("2µs", 2e-6),
        ("2μs", 2e-6),
        ("3us4ns", 3.004e-6),
        ("10m10m", 1200),
    ],
)
def test_a_duration_is_read_as_go_reads_it(text: str, seconds: float) -> None:
    assert csr.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "-", "10", "m", "10 m", "10m ", "1d", "1h-30m", "--1h", ".s", "1e3s", "10M", "1٣s"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        csr.parse_duration(text)


@pytest.mark.parametrize(("text", "seconds"), [("10m", 600), ("8760h", 365 * 86400), ("10m0.9s", 600)])
def test_the_lifetime_of_a_certificate(text: str, seconds: int) -> None:
    assert csr.certificate_seconds(text) == seconds


@pytest.mark.parametrize("text", ["9m59s", "8761h", "-10m", "0", "99999999999999999999h"])
def test_a_lifetime_that_no_certificate_has(text: str) -> None:
    with pytest.raises(ValueError, match="365 days"):
        csr.certificate_seconds(text)


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        ({"type": "Denied", "reason": "No", "message": "not this node"}, "denied: No: not this node$"),
        ({"type": "Failed", "reason": "No"}, "failed: No$"),
        ({"type": "Denied"}, "denied: no reason given$"),
        ({"type": "Denied", "status": "False"}, ""),
    ],
)
def test_a_request_that_is_refused_says_why(condition, why):
    body = {"metadata": {"name": "csr-1"}, "status": {"conditions": [{"status": "True", **condition}]}}
    request = csr.decode_request(json.dumps(body))
    if why:
        with pytest.raises(csr.DeniedError, match=f"^CertificateSigningRequest csr-1 is {why}"):
            request.issued()
    else:
        assert request.issued() == b""
