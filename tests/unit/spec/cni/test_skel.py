"""Every plugin checks its configuration the same, in the same order, whether read from bytes or given as an object.

The table of what is refused is `tests/unit/plugins/builtin/test_registry.py`; the variables are in
`tests/spec/test_requests.py`.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.spec.cni import conf, gojson, versions
from multus_daemon.spec.cni.errors import CniError, DecodingFailureError, IncompatibleVersionError

VALUES: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just({}) | st.just([])
)
VERSIONS = st.sampled_from([*versions.SUPPORTED, "9.9.9", "x", "1.0", ""])
CONFIGURATIONS = st.fixed_dictionaries(
    {},
    optional={
        "name": VALUES | st.just("net"),
        "NAME": VALUES | st.just("net"),
        "cniVersion": VALUES | VERSIONS,
        "CNIVersion": VERSIONS,
        "k": VALUES,
    },
)
VERBS = st.sampled_from([*conf.VERBS, "FOO", ""])


def outcome(check: Any) -> object:
    try:
        return check()
    except CniError as error:
        return type(error), error.to_object()


@given(VERBS, CONFIGURATIONS)
def test_an_object_is_judged_as_its_bytes_are(verb: str, config: dict[str, Any]) -> None:
    raw = json.dumps(config).encode()
    fields = gojson.loads_object(raw)
    judged = outcome(lambda: conf.checked(verb, fields) and fields)
    assert judged == outcome(lambda: conf.configuration(verb, raw))


def test_what_is_found() -> None:
    fields = {"Name": "net", "CNIVERSION": "0.4.0", "k": {"a": [1]}}
    assert conf.checked("CHECK", fields) == ("net", "0.4.0")


@pytest.mark.parametrize("config", [{"name": "n"}, {"name": "n", "cniVersion": ""}, {"name": "n", "cniVersion": None}])
def test_without_a_version_it_is_the_implied_one(config: dict[str, Any]) -> None:
    assert conf.checked("ADD", config)[1] == "0.1.0"


@pytest.mark.parametrize(
    ("verb", "version", "code"),
    [
        ("CHECK", "0.3.1", 1),
        ("CHECK", "0.4.0", 0),
        ("STATUS", "1.0.0", 1),
        ("STATUS", "1.1.0", 0),
        ("GC", "1.0.0", 1),
        ("GC", "1.1.0", 0),
        ("DEL", "0.1.0", 0),
        ("ADD", "9.9.9", 1),
        # A verb that came with a later version needs a valid version.
        ("CHECK", "x", 6),
        ("DEL", "x", 1),
    ],
)
def test_versions(verb: str, version: str, code: int) -> None:
    config = {"name": "n", "cniVersion": version}
    if code:
        with pytest.raises((IncompatibleVersionError, DecodingFailureError)) as caught:
            conf.checked(verb, config)
        assert caught.value.code == code
    else:
        assert conf.checked(verb, config)[1] == version


def test_nothing_of_it_is_changed() -> None:
    config: dict[str, Any] = {"NAME": "n", "name": None, "cniVersion": "1.0.0", "prevResult": {"ips": []}}
    before = json.dumps(config)
    for verb in conf.VERBS:
        outcome(lambda verb=verb: conf.checked(verb, config))
    assert json.dumps(config) == before
