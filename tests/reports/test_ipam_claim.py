"""A persistent address was wanted from an IPAMClaim: the reference is taken, and excludes addresses.

rook/rook#16840; kind: keys and values of a selection element.
"""

import pytest

from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import selection

CLAIM = '"ipam-claim-reference": "mon-a"'


def test_the_reference_is_read() -> None:
    (found,) = selection.parse(f'[{{"name": "public", {CLAIM}}}]', pod_namespace="rook")
    assert (found.ipam_claim_reference, found.unknown) == ("mon-a", ())


def test_addresses_exclude_it() -> None:
    with pytest.raises(CniError, match="exclude each other"):
        selection.parse(f'[{{"name": "public", "ips": ["10.0.0.5/24"], {CLAIM}}}]', pod_namespace="rook")
