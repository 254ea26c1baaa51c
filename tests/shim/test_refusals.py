"""The shim refuses by itself with upstream's bytes, as they are read off its skeleton.

`tests.vectors` plays what was recorded of upstream's shim, `test_variables` has the variables.
"""

from __future__ import annotations

import itertools
import json
import typing

import pytest

if typing.TYPE_CHECKING:
    from tests.shim.conftest import Shim, Stub

VERSIONS = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]
VERBS = ["ADD", "DEL", "CHECK", "STATUS", "GC"]


def error(code: int, msg: str, details: str = "") -> bytes:
    """The text of a CNI error whose strings need no other escapes than those given."""
    tail = f',\n    "details": "{details}"' if details else ""
    return f'{{\n    "code": {code},\n    "msg": "{msg}"{tail}\n}}'.encode()


def test_version_needs_neither_stdin_nor_daemon(shim: Shim) -> None:
    result = shim(stdin=b"{nope", env={"CNI_COMMAND": "VERSION"})
    assert result.code == 0
    assert result.err == b""
    assert result.out == (
        b'{"cniVersion":"1.1.0","supportedVersions":["0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]}\n'
    )


@pytest.mark.parametrize("env", [{}, {"CNI_COMMAND": ""}])
def test_no_command_says_what_it_is(shim: Shim, env: dict[str, str]) -> None:
    result = shim(stdin=b"", env=env)
    assert (result.code, result.out) == (0, b"")
    first, second, rest = result.err.decode().split("\n")
    assert first.startswith("multus-shim ")
    assert second == "CNI protocol versions supported: " + ", ".join(VERSIONS)
    assert rest == ""


@pytest.mark.parametrize("flag", ["--version", "-version", "-v"])
def test_version_flag(shim: Shim, flag: str) -> None:
    result = shim(stdin=b"", env={"CNI_COMMAND": "ADD"}, command=[str(shim.binary), flag])
    assert result.code == 0
    assert result.out.startswith(b"multus-shim: version ")
    assert result.out.count(b"\n") == 1


class TestOrderOfChecks:
    """The first thing wrong is the one reported; each case is wrong in that way and in every later one.

    `test_variables` has the order of the variables.
    """

    def test_stdin_and_name_come_before_an_unknown_verb(self, shim: Shim) -> None:
        assert shim("FROB", stdin=b"").error["code"] == 6
        assert shim("FROB", stdin=b"{}").error["code"] == 7
        assert shim("FROB", stdin=b'{"name":"n","cniVersion":"9"}').error["code"] == 4

    def test_the_name_comes_before_the_version(self, shim: Shim) -> None:
        assert shim(stdin=b'{"cniVersion":"9.9.9"}').error["code"] == 7

    def test_the_verb_gate_comes_before_the_list_of_versions(self, shim: Shim) -> None:
        assert shim("GC", conf={"cniVersion": "1.0.5"}).error["msg"] == "config version does not allow GC"

    def test_the_version_comes_before_our_own_keys(self, shim: Shim) -> None:
        assert shim(conf={"cniVersion": "9.9.9", "cniDir": 5}).error["code"] == 1

    def test_our_own_keys_come_before_the_namespace(self, shim: Shim, own_netns: str) -> None:
        stdin = shim.config(cniDir=5)
        assert shim(env=shim.environment("ADD", CNI_NETNS=own_netns), stdin=stdin).error["code"] == 7


# stdin and the message behind "error unmarshall network config: ", as Go 1.26 words it.
BROKEN_JSON = {
    b"": "unexpected end of JSON input",
    b" \n": "unexpected end of JSON input",
    b"{": "unexpected end of JSON input",
    b"{nope": "invalid character 'n' looking for beginning of object key string",
    b'{"a"': "unexpected end of JSON input",
    b'{"a': "unexpected end of JSON input",
    b"tru": "invalid character ' ' in literal true (expecting 'e')",
    b"nul1": "invalid character '1' in literal null (expecting 'l')",
    b"[1,]": "invalid character ']' looking for beginning of value",
    b'{"a":1,}': "invalid character '}' looking for beginning of object key string",
    b'{"a" 1}': "invalid character '1' after object key",
    b'{"a":1 "b"}': "invalid character '\"' after object key:value pair",
    b"[1 2]": "invalid character '2' after array element",
    b'{"name":"n"}x': "invalid character 'x' after top-level value",
    b'"\n"': "invalid character '\\n' in string literal",
    b'"\\q"': "invalid character 'q' in string escape code",
    b'"\\u12x4"': "invalid character 'x' in \\u hexadecimal character escape",
    b"-": "invalid character ' ' in numeric literal",
    b"01": "invalid character '1' after top-level value",
    b"1.x": "invalid character 'x' after decimal point in numeric literal",
    b"1e+": "invalid character ' ' in exponent of numeric literal",
    b"'": "invalid character '\\'' looking for beginning of value",
    b"\xff": "invalid character 'ÿ' looking for beginning of value",
    b"\x00": "invalid character '\\x00' looking for beginning of value",
    b"[" * 10_001: "invalid character '[' exceeded max depth",
    b"5": 'json: cannot unmarshal number into Go value of type struct { Name string "json:\\"name\\"" }',
    b"[]": 'json: cannot unmarshal array into Go value of type struct { Name string "json:\\"name\\"" }',
    b'{"name":5}': "json: cannot unmarshal number into Go struct field .name of type string",
    b'{"name":{},"name":"n"}': "json: cannot unmarshal object into Go struct field .name of type string",
}


@pytest.mark.conformance("verbs-7")
@pytest.mark.parametrize("stdin", BROKEN_JSON, ids=lambda b: repr(b)[2:-1][:24])
def test_undecodable_stdin(shim: Shim, stdin: bytes) -> None:
    assert shim(stdin=stdin).error == {"code": 6, "msg": "error unmarshall network config: " + BROKEN_JSON[stdin]}


@pytest.mark.parametrize("stdin", [b"null", b"{}", b'{"name":""}', b'{"name":null}', b'{"name":"n","NAME":""}'])
def test_missing_name(shim: Shim, stdin: bytes) -> None:
    assert shim(stdin=stdin).out == error(7, "missing network name")


@pytest.mark.parametrize(("name", "shown"), [("a b", "a b"), ("-a", "-a"), ("a/b", "a/b"), ("é<", "é\\u003c")])
@pytest.mark.parametrize("verb", ["ADD", "GC"])
def test_bad_name(shim: Shim, verb: str, name: str, shown: str) -> None:
    assert shim(verb, conf={"name": name}).out == error(7, "invalid characters found in network name", shown)


@pytest.mark.parametrize("key", ["NAME", "Name", "naMe", "na\\u006de"])
def test_keys_match_without_case_and_after_unescaping(shim: Shim, daemon: Stub, key: str) -> None:
    conf = shim.config(name=None)[1:]
    assert shim(stdin=b'{"' + key.encode() + b'":"n",' + conf).code == 0


@pytest.mark.waits
def test_all_our_keys_match_without_case(shim: Shim, daemon: Stub) -> None:
    conf = {
        "NAME": "n",
        "CNIVERSION": "1.1.0",
        "DAEMONsocketdir": str(shim.socket_dir),
        "CniDir": str(shim.cni_dir),
    }
    assert shim("STATUS", stdin=json.dumps(conf).encode()).code == 0
    assert len(daemon.requests) == 1
    daemon.hang()
    result = shim.hasty("DEL", stdin=json.dumps(conf).encode())
    assert result.code == 0
    assert result.seconds < 30
    assert len(list(shim.spool.iterdir())) == 1


def test_go_folds_two_characters_outside_ascii(shim: Shim) -> None:
    # U+017F folds to "s" and U+212A to "k"; both occur in keys that are read here.
    stdin = '{"name":"n","cniVer\u017fion":"9.9.9"}'.encode()
    assert shim(stdin=stdin).error["code"] == 1
    stdin = '{"name":"n","daemonSoc\u212aetDir":5}'.encode()
    assert shim(stdin=stdin).error["msg"].startswith("daemonSocketDir ")


def test_the_last_of_equal_keys_wins_and_null_is_passed_over(shim: Shim, daemon: Stub) -> None:
    tail = shim.config(name=None, cniVersion=None)[1:]
    assert (
        shim(stdin=b'{"name":"a b","Name":"n","cniVersion":"9","cniversion":"1.0.0","CNIVERSION":null,' + tail).code
        == 0
    )
    assert shim(stdin=b'{"name":"n","NAME":"a b",' + tail).error["code"] == 7


@pytest.mark.parametrize(("verb", "version"), [*itertools.product(VERBS, [*VERSIONS, "", None])])
def test_version_gates(shim: Shim, daemon: Stub, verb: str, version: str | None) -> None:
    least = {"CHECK": "0.4.0", "STATUS": "1.1.0", "GC": "1.1.0"}.get(verb, "0.1.0")
    result = shim(verb, conf={"cniVersion": version})
    if (version or "0.1.0") >= least:
        assert (result.code, len(daemon.requests)) == (0, 1)
    else:
        assert result.out == error(1, f"config version does not allow {verb}")
        assert daemon.requests == []


@pytest.mark.parametrize(
    ("verb", "version", "expected"),
    [
        ("CHECK", "9.9.9", {"code": 1, "msg": "plugin version does not allow CHECK"}),
        ("GC", "1.1.1", {"code": 1, "msg": "plugin version does not allow GC"}),
        ("GC", "1.0.0.0", {"code": 6, "msg": 'invalid version "1.0.0.0": too many parts'}),
        (
            "STATUS",
            "1.x",
            {
                "code": 6,
                "msg": 'failed to convert minor version part "x": strconv.Atoi: parsing "x": invalid syntax',
            },
        ),
        (
            "CHECK",
            "99999999999999999999",
            {
                "code": 6,
                "msg": 'failed to convert major version part "99999999999999999999": strconv.Atoi: parsing '
                '"99999999999999999999": value out of range',
            },
        ),
    ],
)
def test_odd_versions_with_gates(shim: Shim, verb: str, version: str, expected: dict[str, object]) -> None:
    assert shim(verb, conf={"cniVersion": version}).error == expected


@pytest.mark.parametrize(
    ("version", "shown"), [("9.9.9", "9.9.9"), ("1.1", "1.1"), ("1.1.0\n", "1.1.0\\n"), ('"', '\\"')]
)
@pytest.mark.parametrize("verb", ["ADD", "DEL"])
def test_unsupported_version(shim: Shim, verb: str, version: str, shown: str) -> None:
    supported = " ".join(f'"{v}"' for v in VERSIONS)
    assert shim(verb, conf={"cniVersion": version}).error == {
        "code": 1,
        "msg": "incompatible CNI versions",
        "details": f'config is "{shown}", plugin supports [{supported}]',
    }


@pytest.mark.parametrize("verb", VERBS)
def test_version_of_a_wrong_type(shim: Shim, verb: str) -> None:
    assert shim(verb, conf={"cniVersion": 1.0}).error == {
        "code": 6,
        "msg": "decoding version from network config: json: cannot unmarshal number into Go struct field "
        ".cniVersion of type string",
    }


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("daemonSocketDir", 5),
        ("daemonSocketDir", "/a\x00b"),
        ("cniDir", ["x"]),
    ],
)
def test_our_keys_with_bad_values(shim: Shim, daemon: Stub, verb: str, key: str, value: object) -> None:
    error = shim(verb, conf={key: value}).error
    assert error["code"] == 7
    assert error["msg"].startswith(f"{key} must ")
    assert daemon.requests == []


@pytest.mark.parametrize("value", ["x", -1, None, {}])
def test_removed_keys_are_ignored(shim: Shim, daemon: Stub, value: object) -> None:
    assert shim(conf={"daemonWaitSeconds": value, "daemonReplySeconds": value}).code == 0


@pytest.mark.parametrize("verb", ["ADD", "DEL"])
def test_own_namespace_is_refused_before_the_daemon_is_called(
    shim: Shim, daemon: Stub, own_netns: str, verb: str
) -> None:
    result = shim(env=shim.environment(verb, CNI_NETNS=own_netns))
    assert result.code == 1
    assert result.out == error(8, "plugin's netns and netns from CNI_NETNS should not be the same")
    assert daemon.requests == []


@pytest.mark.parametrize("override", ["1", "true", "TRUE", "True"])
def test_own_namespace_with_override(shim: Shim, daemon: Stub, own_netns: str, override: str) -> None:
    env = shim.environment("ADD", CNI_NETNS=own_netns, CNI_NETNS_OVERRIDE=override)
    assert (shim(env=env).code, len(daemon.requests)) == (0, 1)


@pytest.mark.parametrize("override", ["0", "yes", "t", ""])
def test_own_namespace_with_something_else_than_an_override(shim: Shim, own_netns: str, override: str) -> None:
    env = shim.environment("ADD", CNI_NETNS=own_netns, CNI_NETNS_OVERRIDE=override)
    assert shim(env=env).error["code"] == 8


def test_other_verbs_and_unreadable_namespaces_pass(shim: Shim, daemon: Stub, own_netns: str) -> None:
    assert shim(env=shim.environment("CHECK", CNI_NETNS=own_netns)).code == 0
    assert shim(env=shim.environment("ADD", CNI_NETNS="/does/not/exist")).code == 0
    assert shim(env=shim.environment("DEL", CNI_NETNS=None)).code == 0
    assert len(daemon.requests) == 3
