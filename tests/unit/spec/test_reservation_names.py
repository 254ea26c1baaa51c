"""Names of reservations, as whereabouts writes them."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.spec.addresses import object_name, split_name

SCOPES = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True) | st.just("")


@given(st.ip_addresses(v=4) | st.ip_addresses(v=6), SCOPES)
def test_the_address_and_the_scope_of_a_name(address, scope):
    if address.version == 6 and address.ipv4_mapped:
        return
    assert split_name(object_name(address, scope), [scope]) == (scope, address)


@pytest.mark.parametrize(
    ("name", "scope", "address"),
    [
        ("10.9.0.1", "", "10.9.0.1"),
        ("storage-a-10.9.0.1", "storage-a", "10.9.0.1"),
        ("fd00--1", "", "fd00::1"),
        ("fd00--0", "", "fd00::"),
        ("storage-fd00--1", "storage", "fd00::1"),
        ("2001-db8-1-2-3-4-5-6", "", "2001:db8:1:2:3:4:5:6"),
    ],
)
def test_an_unknown_scope_is_what_is_no_address(name, scope, address):
    assert split_name(name) == (scope, ipaddress.ip_address(address))


def test_a_name_that_has_no_address():
    assert split_name("storage") is None
    assert split_name("") is None
