"""A secret is removed wherever it stands; ordinary configuration stays as it is."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.settings import Settings
from multus_tools import scrub
from multus_tools.scrub import REMOVED, Scrubber, looks_secret

SECRET = "s3cr3t~Zq9"
PEM = f"-----BEGIN RSA PRIVATE KEY-----\nMIIE{SECRET}\nabc=\n-----END RSA PRIVATE KEY-----"

words = st.sampled_from(
    ["password", "passwd", "secret", "token", "key", "credential", "credentials", "auth", "psk", "private", "pwd"]
)
ordinary_keys = st.sampled_from(["subnet", "master", "name", "plugins", "ipam", "config", "spec", "labels", "value"])


@st.composite
def secret_keys(draw: st.DrawFn) -> str:
    """A key that looks like a secret's, as programs of all kinds write it."""
    word = draw(words)
    word = draw(st.sampled_from([word, word.upper(), word.capitalize()]))
    before = draw(st.sampled_from(["", "client", "db_", "my-", "x.", "api "]))
    after = draw(st.sampled_from(["", "Data", "_1", "-data"]))
    return f"{before}{word}{after}" if not before[-1:].isalpha() else f"{before}{word.capitalize()}{after}"


def surrounded(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The value somewhere in a JSON value, also as JSON in a string, and in base64."""
    ordinary = st.one_of(st.integers(), st.booleans(), st.none(), st.text(max_size=8))
    as_text = st.builds(json.dumps, inner)
    return st.one_of(
        st.builds(lambda key, item, other: {"mtu": other, key: item}, ordinary_keys, inner, ordinary),
        st.builds(lambda item, other: [other, item, other], inner, ordinary),
        as_text,
        st.builds(lambda text: base64.b64encode(text.encode()).decode(), as_text),
    )


hidden = st.sampled_from([SECRET, [SECRET], {"a": [SECRET]}, json.dumps({"a": SECRET})])
in_objects = st.recursive(
    st.one_of(
        st.builds(lambda key, value: {key: value, "type": "ptp"}, secret_keys(), hidden),
        st.builds(lambda key: {"name": key, "value": SECRET}, secret_keys()),
        st.builds(lambda key: {"env": [{"name": key, "value": SECRET}]}, ordinary_keys),
        st.builds(lambda key: {"env": {key: SECRET}}, ordinary_keys),
        st.builds(lambda key: {"environment": [f"{key}={SECRET}"]}, ordinary_keys),
        st.builds(lambda key: {"cniArgs": [["IgnoreUnknown", "1"], [key, SECRET]]}, secret_keys()),
        st.builds(lambda word: {"args": ["run", f"--{word}", SECRET, "--v=2"]}, words),
        st.builds(lambda key: {"args": ["run", f"--{key}={SECRET}"]}, words),
        st.builds(lambda key: {"url": f"https://user:{SECRET}@host/{key}"}, ordinary_keys),
        st.builds(lambda key: {key: f"Bearer {SECRET}"}, ordinary_keys),
        st.builds(lambda key: {key: PEM}, ordinary_keys),
        st.builds(lambda key: {f"x {PEM}": key}, ordinary_keys),
    ),
    surrounded,
    max_leaves=3,
)


def cleaned(value: Any) -> str:
    """The value without secrets, and the list of removals, as text."""
    found, removals = Scrubber().value(value)
    assert removals
    return json.dumps([found, [[item.where, item.reason] for item in removals]], ensure_ascii=False)


@given(in_objects)
def test_no_secret_is_left_in_an_object(value: Any) -> None:
    assert SECRET not in cleaned(value)


@given(in_objects, st.sampled_from(["", "[debug] stdin=", "plugin failed: [x] "]))
def test_no_secret_is_left_in_a_line_with_json(value: Any, before: str) -> None:
    line = before + json.dumps(value)
    text, removals = Scrubber().text(f'[verbose] first line\n{line}\n[verbose] the last line pod="a/b"')
    assert removals
    assert SECRET not in text
    assert text.startswith("[verbose] first line\n")
    assert text.endswith('[verbose] the last line pod="a/b"')


@st.composite
def in_texts(draw: st.DrawFn) -> str:
    key = draw(secret_keys())
    if " " in key:
        key = key.replace(" ", "_")
    line = draw(
        st.sampled_from(
            [
                f"{key}={SECRET}",
                f"{key}: {SECRET}",
                f'{key}="a b {SECRET}"',
                f"{key}='{SECRET} \"x\"'",
                f'"{key}": "x \\" {SECRET}"',
                f'{{\\"{key}\\": \\"{SECRET}\\"}}',
                f'{{\\\\\\"{key}\\\\\\":\\\\\\"{SECRET}\\\\\\"}}',
                f"CNI_ARGS=IgnoreUnknown=1;{key}={SECRET}",
                f'{{"{key}": {{"a": "{SECRET}"',
                f'{{"{key}": "{SECRET}',
                f"Authorization: Bearer {SECRET}",
                f"authorization=bearer {SECRET}",
                f"curl https://{SECRET}@host/ {key}",
                f"curl https://me:{SECRET}@host:80/ {key}",
                f"curl https://me:a/{SECRET}@host:80/",
                f"password {SECRET}",
                f"the token is {SECRET}",
                f"X-Vendor-Id: {SECRET}",
                f"curl -H 'X-Vendor-Id: {SECRET}' https://host/",
                f"Set-Cookie: session={SECRET}; Secure",
                PEM.replace("\n", "\\n"),
                PEM[:50],
                PEM[40:],
            ]
        )
    )
    return draw(st.sampled_from(["", "msg ", "2026-01-01T00:00:00Z [debug] stdin "])) + line


@given(in_texts(), st.sampled_from(["", " pod=default/web", "\n[verbose] next"]))
def test_no_secret_is_left_in_a_text(text: str, rest: str) -> None:
    for found in (Scrubber().text(text + rest), Scrubber().value({"message": text + rest})):
        assert SECRET not in json.dumps(found[0])
        assert found[1]
        assert all(SECRET not in item.where for item in found[1])


@pytest.mark.parametrize("style", ["|", ">-", "|2+", "", "# a comment"])
@pytest.mark.parametrize("key", ["password", '"client-key"', "- tls.token", "stringData/password"])
@pytest.mark.parametrize("before", ["", "    "])
def test_no_secret_is_left_in_a_block_of_yaml(style: str, key: str, before: str) -> None:
    body = [f"  first {SECRET}", "", f"     {SECRET}", f"  - {SECRET}", f"  inner: {SECRET}"]
    text = "\n".join(["kind: Config", *(before + line for line in (f"{key}: {style}", *body, "name: blue")), "end"])
    for found, removals in (Scrubber().text(text), Scrubber().value({"message": text})):
        shown = found if isinstance(found, str) else found["message"]
        assert SECRET not in shown
        assert removals
        assert shown.splitlines()[-2:] == [f"{before}name: blue", "end"]
    once = Scrubber().text(text)[0]
    assert Scrubber().text(once)[0] == once


def test_a_list_of_yaml_may_be_as_deep_as_its_key() -> None:
    found, _ = Scrubber().text(f"tokens:\n- {SECRET}\n- {SECRET}\nname: blue")
    assert found == f"tokens:\n{REMOVED}\nname: blue"


def test_ten_times_the_private_keys_take_ten_times_as_long() -> None:
    seconds = []
    for number in (500, 5000):
        text = (PEM[40:] + "\n") * number
        began = time.process_time()
        found, removals = Scrubber().text(text)
        seconds.append(time.process_time() - began)
        assert SECRET not in found
        assert len(removals) == number
    # It was a hundred times.
    assert seconds[1] < 30 * seconds[0]


@given(st.text())
def test_every_text_is_searched(text: str) -> None:
    Scrubber().text(text)
    Scrubber().value(text)


@given(st.text(alphabet='{}[]":,\\ \npasword=<>-@/ey.0', max_size=80))
def test_a_cleaned_text_stays_as_it_is(text: str) -> None:
    once, _ = Scrubber().text(text)
    assert Scrubber().text(once)[0] == once


ORDINARY: list[Any] = [
    {
        "cniVersion": "1.0.0",
        "name": "blue",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "br0",
                "master": "eth1",
                "mtu": 1400,
                "isGateway": True,
                "ipam": {"type": "host-local", "subnet": "10.1.0.0/16", "routes": [{"dst": "0.0.0.0/0"}]},
                "capabilities": {"portMappings": True},
            },
            {"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}, "mac": "02:00:00:00:00:01"},
            {"type": "macvlan", "mode": "private", "linkInContainer": False},
        ],
    },
    {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": '[{"name": "blue", "interface": "net1"}]'}}},
    {"result": "not found: NetworkAttachmentDefinition default/blue; see https://host/a@b"},
    {"enableAuth": True, "token": "", "secrets": [], "password": None},
    {"served": ["tokens"], "steps": [{"what": "plugin ptp: ADD success", "at": 0.1}]},
    json.loads(json.dumps(Settings().effective())),
]


@pytest.mark.parametrize("value", ORDINARY)
def test_ordinary_values_stay(value: Any) -> None:
    assert Scrubber().value(value) == (value, [])
    text = json.dumps(value, indent=3)
    assert Scrubber().text(text) == (text, [])


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-24T10:00:00.000+00:00 [verbose] CNI ADD finished pod=default/web container=c1 seconds=0.012",
        'multus_server_request_total{handler="/cni",code="200",method="POST"} 3.0',
        'secrets "x" is forbidden: User "system:serviceaccount:kube-system:multus" cannot get it',
        "GET https://10.0.0.1:6443/api/v1/pods?limit=500: nothing heard within 10 s",
    ],
)
def test_ordinary_lines_stay(line: str) -> None:
    assert Scrubber().text(f"{line}\n{line}") == (f"{line}\n{line}", [])


@pytest.mark.parametrize("key", ["master", "subnet", "name", "monitor", "passthru", "passedOver", "mappings", "type"])
def test_ordinary_keys_are_not_secret(key: str) -> None:
    assert not looks_secret(key)


def test_the_rest_of_a_text_stays() -> None:
    text = f'[debug] plugin failed password="{SECRET} x" pod=default/web\n[debug] --token {SECRET} --v 2'
    found, removals = Scrubber().text(text)
    assert found == f'[debug] plugin failed password="{REMOVED}" pod=default/web\n[debug] --token {REMOVED} --v 2'
    assert [item.where for item in removals] == ["line 1: password", "line 2: --token"]


def test_a_removal_names_the_key_and_why() -> None:
    value = {"plugins": [{"psk": SECRET}, {"x": {"env": {"A": "b"}}}], "config": json.dumps({"apiKey": SECRET})}
    found, removals = Scrubber().value(value)
    assert found["plugins"] == [{"psk": REMOVED}, {"x": {"env": {"A": REMOVED}}}]
    assert json.loads(found["config"]) == {"apiKey": REMOVED}
    assert [(item.where, item.reason) for item in removals] == [
        ("plugins[0].psk", scrub.BY_KEY),
        ("plugins[1].x.env.A", scrub.ENVIRONMENT),
        ("config.apiKey", scrub.BY_KEY),
    ]


def test_a_removed_value_is_removed_from_what_comes_later() -> None:
    scrubber = Scrubber([f"token-of-{SECRET}"])
    scrubber.value({"password": SECRET})
    found, removals = scrubber.text(f"the plugin says: {SECRET} is wrong, token-of-{SECRET} too")
    assert SECRET not in found
    assert {item.reason for item in removals} == {scrub.KNOWN}
    # Words that stand elsewhere with another meaning.
    scrubber.value({"password": "default", "token": "kubernetes"})
    assert scrubber.text("default kubernetes")[0] == "default kubernetes"


def test_what_the_daemon_removed_is_listed_too() -> None:
    once, _ = Scrubber().value({"config": {"psk": SECRET, "note": PEM}})
    again, removals = Scrubber().value(once)
    assert again == once
    assert [(item.where, item.reason) for item in removals] == [
        ("config.psk", scrub.BY_KEY),
        ("config.note", scrub.BEFORE),
    ]


def test_a_repeated_key_hides_nothing() -> None:
    found, _ = Scrubber().text(f'{{"a": {{"password": "{SECRET}"}}, "a": 1}}')
    assert SECRET not in found
    assert json.loads(found)["a (repeated)"] == 1


def test_an_escaped_key_hides_nothing() -> None:
    for text in (f'{{"p\\u0061ssword": "{SECRET}"}}', f'{{"p\\u0061ssword": "{SECRET}"'):
        assert SECRET not in Scrubber().text(text)[0]
        assert SECRET not in json.dumps(Scrubber().value({"annotation": text})[0])


def test_what_is_too_deep_is_removed() -> None:
    value: Any = {"a": SECRET}
    for _ in range(scrub.DEPTH_MAX + 5):
        value = [value]
    found, removals = Scrubber().value(value)
    assert SECRET not in json.dumps(found)
    assert [item.reason for item in removals] == [scrub.TOO_DEEP]
    deep = "[" * 100_000 + f'"{SECRET}"' + "]" * 100_000
    Scrubber().text(deep)


@pytest.mark.parametrize(
    "text",
    [
        "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJzeXN0ZW0ifQ.c2lnbmF0dXJl",
        "abcde1.0123456789abcdef",
        "Bearer abc",
    ],
)
def test_tokens_are_known_by_their_form(text: str) -> None:
    found, removals = Scrubber().value({"message": f"refused: {text} (403)"})
    assert text.split()[-1] not in found["message"]
    assert found["message"].endswith(" (403)")
    assert len(removals) == 1
