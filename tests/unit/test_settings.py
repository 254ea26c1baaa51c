import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon import settings
from multus_daemon.plugins.builtin.registry import PLUGINS
from multus_daemon.settings import Settings, SettingsError, keys

# Every key of upstream's daemon-config.json (v4.3.0) with a value that upstream takes, and those that only its
# documents and tests name.
UPSTREAM: dict[str, Any] = {
    "chrootDir": "/hostroot",
    "socketDir": "/host/run/multus/",
    "connectionLimit": 10,
    "metricsPort": 9091,
    "enablePprof": True,
    "perNodeCertificate": {"enabled": True, "bootstrapKubeconfig": "/b", "certDir": "/c", "certDuration": "24h"},
    "logFile": "/var/log/multus.log",
    "logLevel": "verbose",
    "logToStderr": True,
    "logOptions": {"maxAge": 5, "maxSize": 100, "maxBackups": 5, "compress": True},
    "multusConfigFile": "auto",
    "cniConfigDir": "/host/etc/cni/net.d",
    "multusAutoconfigDir": "/host/etc/cni/net.d",
    "multusMasterCNI": "10-flannel.conflist",
    "cniVersion": "0.3.1",
    "forceCNIVersion": False,
    "overrideNetworkName": True,
    "readinessindicatorfile": "/ready",
    "clusterNetwork": "flannel",
    "capabilities": {"portMappings": True},
    "binDir": "/opt/cni/bin",
    "cniDir": "/var/lib/cni/multus",
    "confDir": "/etc/cni/multus/net.d",
    "namespaceIsolation": True,
    "globalNamespaces": "default,shared",
    "auxiliaryCNIChainName": "aux",
    "daemonSocketDir": "/run/multus/",
    "type": "multus-shim",
    "name": "multus-cni-network",
    "kubeconfig": "/etc/kubeconfig",
    "multusNamespace": "kube-system",
    "systemNamespaces": ["kube-system"],
    "defaultNetworks": ["a"],
    "delegates": [{"name": "a", "type": "bridge"}],
    "retryDeleteOnError": False,
    "allowTryDeleteOnErr": True,
    "defaultnetworkwaitseconds": 60,
    "defaultnetworkfile": "/f",
}

# Upstream does not lay these over requests, or need not: requests have them from the generated configuration.
OF_THE_NODE = {
    *("capabilities", "cniConfigDir", "multusAutoconfigDir", "multusConfigFile", "multusMasterCNI"),
    *("overrideNetworkName", "readinessindicatorfile", "type"),
}

DEFAULTS: dict[str, Any] = {
    "auxiliaryCNIChainName": "",
    "binDir": "/opt/cni/bin",
    "builtinPlugins": "prefer",
    "builtinPluginsExcept": (),
    "capabilities": {},
    "chrootDir": "",
    "kubeletDir": "/var/lib/kubelet",
    "clusterNetwork": "",
    "cniConfigDir": "/etc/cni/net.d",
    "cniDir": "/var/lib/cni/multus",
    "upstreamRecords": True,
    "cniVersion": "",
    "confDir": "/etc/cni/multus/net.d",
    "connectionLimit": 0,
    "daemonSocketDir": "",
    "defaultNetworks": (),
    "delegateTimeoutSeconds": 120.0,
    "delegates": (),
    "forceCNIVersion": False,
    "globalNamespaces": "default",
    "kubeconfig": "",
    "logFile": "",
    "logFormat": "text",
    "logLevel": "verbose",
    "logOptions": {"maxSize": 100, "maxBackups": 5, "maxAge": 5, "compress": True},
    "logToStderr": True,
    "maxDelegateProcesses": 0,
    "metricsAddress": "",
    "metricsAuthorization": False,
    "metricsPort": None,
    "metricsTLS": None,
    "attachmentMetrics": "networks",
    "multusAutoconfigDir": "",
    "multusConfigFile": "auto",
    "multusMasterCNI": "",
    "multusNamespace": "kube-system",
    "namespaceIsolation": False,
    "overrideNetworkName": False,
    "addressesNamespace": "kube-system",
    "perNodeCertificate": None,
    "pluginEnv": (),
    "deleteTries": 5,
    "hotplug": "off",
    "keep": "report",
    "networksReadyCondition": False,
    "reconcileSeconds": 300.0,
    "readinessindicatorfile": "",
    "runtimeConfig": {},
    "socketDir": "/run/multus/",
    "startupTaint": "",
    "statusWrite": "best-effort",
    "strictCheck": False,
    "strictRequests": False,
    "systemNamespaces": ("kube-system",),
    "type": "multus-shim",
}


KNOWN = f"known: {', '.join(sorted(PLUGINS))}"


def read(**fields: Any) -> Settings:
    return settings.parse(json.dumps(fields).encode(), "test.json")


def problems(data: bytes) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        settings.parse(data, "test.json")
    assert str(caught.value).startswith("test.json: ")
    return caught.value.problems


@pytest.mark.weak_spot(46)
@pytest.mark.conformance("config-11")
def test_defaults() -> None:
    assert read() == Settings()
    assert read().effective() == DEFAULTS


@pytest.mark.conformance("server-9", "server-11", "config-3", "config-4", "config-12")
@pytest.mark.parametrize(("key", "value"), UPSTREAM.items())
def test_every_upstream_key_has_an_effect_or_a_warning(key: str, value: Any) -> None:
    found = read(**{key: value})
    if key in settings.WITHOUT_EFFECT:
        [warning] = found.warnings
        assert warning.startswith(f"{key}: no effect: ")
        assert found.overlay == {}
        assert found.effective() == DEFAULTS
    else:
        assert json.loads(json.dumps(found.effective()[key])) == value
        assert found.given == {key: value}
        assert found.overlay == ({} if key in OF_THE_NODE else {key: value})


def test_a_whole_upstream_configuration() -> None:
    found = read(**UPSTREAM)
    assert found.paths.chroot_dir == "/hostroot"
    assert found.socket.directory == "/host/run/multus/"
    assert found.metrics.port == 9091
    assert {warning.partition(":")[0] for warning in found.warnings} == {
        *(key for key in UPSTREAM if key in settings.WITHOUT_EFFECT),
    }


@pytest.mark.parametrize("key", sorted(settings.known_keys() - UPSTREAM.keys() - settings.WITHOUT_EFFECT.keys()))
def test_our_own_keys_are_no_upstream_keys_without_effect(key: str) -> None:
    assert key in DEFAULTS


def test_keys_match_in_any_case_and_null_is_absent() -> None:
    found = read(CHROOTDIR="/h", bindir="/b", RetryDeleteOnError=True, logLevel=None, metricsPort=None)
    assert (found.paths.chroot_dir, found.paths.bin_dir, found.logs.level) == ("/h", "/b", "verbose")
    assert found.overlay == {"chrootDir": "/h", "binDir": "/b"}
    assert len(found.warnings) == 1


@pytest.mark.conformance("server-9", "programs-16")
@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("chrootDir", 1, "chrootDir: a string is needed, not a whole number"),
        ("socketDir", "", "socketDir: a string of length >= 1 is needed"),
        ("binDir", ["/a"], "binDir: a string is needed, not a list"),
        ("attachmentMetrics", "all", "attachmentMetrics: Invalid enum value 'all'; known: off, networks"),
        ("metricsPort", 0, "metricsPort: a whole number >= 1 is needed"),
        ("metricsPort", 65536, "metricsPort: a whole number <= 65535 is needed"),
        ("metricsPort", "9091", "metricsPort: a whole number or null is needed, not a string"),
        ("metricsPort", True, "metricsPort: a whole number or null is needed, not a boolean"),
        ("metricsPort", 10**30, "metricsPort: a whole number <= 65535 is needed"),
        ("metricsPort", 9091.5, "metricsPort: a whole number or null is needed, not a number"),
        ("metricsTLS", "tls.crt", "metricsTLS: an object or null is needed, not a string"),
        ("metricsTLS", {"certFile": "/c"}, "metricsTLS: Object missing required field `keyFile`"),
        (
            "metricsTLS",
            {"certFile": "", "keyFile": "/k"},
            "metricsTLS.certFile: a string of length >= 1 is needed",
        ),
        (
            "metricsTLS",
            {"certFile": "/c", "keyFile": "/k", "ca": "/a"},
            "metricsTLS: Object contains unknown field `ca`",
        ),
        ("metricsAuthorization", "true", "metricsAuthorization: a boolean is needed, not a string"),
        (
            "metricsAuthorization",
            True,
            "metricsAuthorization: needs metricsTLS, or tokens cross the network in plain text",
        ),
        ("logLevel", "info", "logLevel: Invalid enum value 'info'; known: panic, error, verbose, debug"),
        ("logLevel", "debug\n", "logLevel: Invalid enum value 'debug\\n'; known: panic, error, verbose, debug"),
        ("logLevel", "", "logLevel: Invalid enum value ''; known: panic, error, verbose, debug"),
        ("logLevel", 1, "logLevel: a string is needed, not a whole number"),
        ("logFormat", "xml", "logFormat: Invalid enum value 'xml'; known: text, json"),
        ("logToStderr", "true", "logToStderr: a boolean is needed, not a string"),
        ("logToStderr", 1, "logToStderr: a boolean is needed, not a whole number"),
        ("logOptions", [], "logOptions: an object is needed, not a list"),
        ("logOptions", {"maxSize": "1"}, "logOptions.maxSize: a whole number is needed, not a string"),
        ("logOptions", {"MAXBACKUPS": -1}, "logOptions.maxBackups: a whole number >= 0 is needed"),
        ("logOptions", {"maxSzie": 1}, "logOptions.maxSzie: unknown key, is maxSize meant?"),
        ("delegates", {}, "delegates: a list is needed, not an object"),
        ("delegates", [{}, 1], "delegates[1]: an object is needed, not a whole number"),
        ("defaultNetworks", "a", "defaultNetworks: a list is needed, not a string"),
        ("defaultNetworks", ["a", None], "defaultNetworks[1]: a string is needed, not null"),
        ("globalNamespaces", ["a"], "globalNamespaces: a string is needed, not a list"),
        ("namespaceIsolation", 0, "namespaceIsolation: a boolean is needed, not a whole number"),
        ("builtinPlugins", "always", "builtinPlugins: Invalid enum value 'always'; known: off, fallback, prefer"),
        (
            "builtinPluginsExcept",
            ["bridge", "ovs"],
            f"builtinPluginsExcept[1]: Invalid enum value 'ovs'; {KNOWN}",
        ),
        ("builtinPluginsExcept", ["Bridge"], f"builtinPluginsExcept[0]: Invalid enum value 'Bridge'; {KNOWN}"),
        ("builtinPluginsExcept", "bridge", "builtinPluginsExcept: a list is needed, not a string"),
        ("builtinPluginsExcept", [None], "builtinPluginsExcept[0]: a string is needed, not null"),
        ("delegateTimeoutSeconds", 0, "delegateTimeoutSeconds: a number > 0.0 is needed"),
        ("delegateTimeoutSeconds", 3601, "delegateTimeoutSeconds: a number <= 3600.0 is needed"),
        ("pluginEnv", "A", "pluginEnv: a list is needed, not a string"),
        ("pluginEnv", ["A", "B=1"], "pluginEnv: 'B=1' is not the name of a variable"),
        ("pluginEnv", [""], "pluginEnv: '' is not the name of a variable"),
        ("pluginEnv", ["CNI_ARGS"], "pluginEnv: CNI_ARGS is part of CNI: each call sets it"),
        ("pluginEnv", ["GOMAXPROCS"], "pluginEnv: GOMAXPROCS is always 2"),
        ("pluginEnv", ["LC_ALL"], "pluginEnv: LC_ALL is always C: the daemon reads what is printed"),
        ("chrootDri", "/", "chrootDri: unknown key, is chrootDir meant?"),
        ("CHROOTDIRECTORY", "/", "CHROOTDIRECTORY: unknown key, is chrootDir meant?"),
        ("zzz", 1, "zzz: unknown key"),
        ("", 1, ": unknown key"),
    ],
)
def test_what_is_wrong_is_said_with_its_key(key: str, value: Any, problem: str) -> None:
    [found] = problems(json.dumps({key: value}).encode())
    assert found == problem


def test_text_that_is_no_json_is_told_with_line_and_column() -> None:
    assert problems(b'{\n  "binDir": "/a",\n}') == ["not JSON: trailing comma in object (line 3, column 1)"]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'{"binDir": "/a", "cniDir": "/c", "binDir": "/a"}', ["binDir"]),
        (b'{"binDir": "/a", "BINDIR": "/b"}', ["binDir", "BINDIR"]),
        (b'{"logOptions": {"maxSize": 1, "maxSize": 2}}', ["logOptions.maxSize"]),
        (b'{"delegates": [{"type": "a"}, {"type": "a", "type": "b"}]}', ["delegates[1].type"]),
    ],
)
def test_a_key_that_is_there_twice_is_an_error(data: bytes, found: list[str]) -> None:
    assert problems(data) == [f"{key}: is set more than once" for key in found]


def test_tokens_of_scrapers_are_reviewed_in_a_cluster_only() -> None:
    given = read(metricsTLS={"certFile": "/c", "keyFile": "/k"}, metricsAuthorization=True)
    assert given.metrics.authorization
    with pytest.raises(SettingsError) as raised:
        settings.for_standalone(given)
    assert raised.value.problems == ["metricsAuthorization: needs an API server, which reviews the tokens"]
    assert settings.for_standalone(read(metricsPort=1)).metrics.address == "127.0.0.1"


def test_all_problems_are_said_at_once() -> None:
    found = problems(
        json.dumps(
            {"binDir": 1, "zzz": 1, "metricsPort": 0, "logLevel": "x", "logOptions": {"y": 1, "compress": 1}}
        ).encode()
    )
    assert sorted(line.partition(":")[0] for line in found) == [
        "binDir",
        "logLevel",
        "logOptions.compress",
        "logOptions.y",
        "metricsPort",
        "zzz",
    ]


def test_keys_without_effect_have_a_warning_each_with_the_reason() -> None:
    found = read(**dict.fromkeys(settings.WITHOUT_EFFECT, "anything"), binDir="/b")
    assert found.warnings == tuple(f"{key}: no effect: {reason}" for key, reason in settings.WITHOUT_EFFECT.items())
    assert found.given == {"binDir": "/b"}


@pytest.mark.parametrize(("key", "value"), settings.REMOVED_VALUES)
def test_a_removed_value_is_replaced_with_a_warning(key: str, value: str) -> None:
    instead = settings.REMOVED_VALUES[key, value]
    found = read(**{key.upper(): value})
    [warning] = found.warnings
    assert warning.startswith(f"{key}: {value} is removed, {instead} is used")
    assert found.effective() == read(**{key: instead}).effective()
    assert found.overlay == {key: instead}


@pytest.mark.parametrize("value", [1, 1.5, 3600])
def test_seconds_are_whole_or_not(value: float) -> None:
    assert read(delegateTimeoutSeconds=value).plugins.delegate_timeout_seconds == value


@pytest.mark.parametrize("value", ["PANIC", "Error", "verbose", "debug"])
def test_log_levels_in_any_case(value: str) -> None:
    found = read(loglevel=value)
    assert found.logs.level == found.effective()["logLevel"] == value.lower()


@pytest.mark.conformance("config-4")
def test_log_options_are_found_by_the_documented_spelling() -> None:
    assert read(logOptions={"MaxSize": 7, "maxbackups": None}).logs.options == keys.LogOptions(max_size=7)


@pytest.mark.conformance("config-2")
@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"{}{}", b"\xff", b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"a":' * 100_000, b'{"metricsPort":1e999}',
     b'{"metricsPort":' + b"9" * 10_000 + b"}"],
)  # fmt: skip
def test_what_is_no_json(data: bytes) -> None:
    [problem] = problems(data)
    assert problem.startswith("not JSON: ")


@pytest.mark.parametrize("data", [b"[]", b"null", b"1", b'"x"'])
def test_what_is_no_object(data: bytes) -> None:
    assert problems(data) == ["a JSON object is needed"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(sorted(settings.known_keys())) | st.text(), JSON, max_size=4))
def test_nothing_but_settings_errors_is_raised(fields: dict[str, Any]) -> None:
    try:
        found = read(**fields)
    except SettingsError as error:
        assert error.problems  # noqa: PT017 - what is raised by chance is looked at, not demanded
        return
    assert set(found.overlay) <= set(DEFAULTS)


# --- files -----------------------------------------------------------------------------------------------------------


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "daemon-config.json"
    path.write_text('{"chrootDir": "/hostroot"}')
    assert settings.load(path).paths.chroot_dir == "/hostroot"


def file_problem(path: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        settings.load(path)
    assert caught.value.source == str(path)
    [problem] = caught.value.problems
    return problem


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    large, fifo = tmp_path / "large", tmp_path / "fifo"
    large.write_bytes(b" " * (settings.CONFIG_MAX_BYTES + 1))
    os.mkfifo(fifo)
    assert file_problem(tmp_path / "none") == "can't be read: No such file or directory"
    assert file_problem(tmp_path) == "can't be read: not a regular file"
    assert file_problem(fifo) == "can't be read: not a regular file"
    assert file_problem(large) == f"can't be read: larger than {settings.CONFIG_MAX_BYTES} bytes"


# --- the tables agree ------------------------------------------------------------------------------------------------


def test_no_key_is_declared_twice() -> None:
    names = [item.metadata["key"] for kind in keys.GROUPS.values() for item in dataclasses.fields(kind)]
    assert len(names) == len(set(names))
    assert not set(names) & set(settings.WITHOUT_EFFECT)
    assert len({key.lower() for key in settings.known_keys()}) == len(settings.known_keys())


def test_what_an_ordinary_user_has_not_set_is_in_a_directory_of_theirs() -> None:
    found = settings.in_directory(read(), Path("/run/user/1000"))
    assert (found.socket.directory, found.paths.cni_dir) == ("/run/user/1000/multus", "/run/user/1000/multus/cni")
    given = read(socketDir="/s", cniDir="/c")
    assert settings.in_directory(given, Path("/run/user/1000")) == given
    assert settings.in_directory(read(), None) == read()


# --- the user's directory --------------------------------------------------------------------------------------------


def test_the_directory_is_the_users_own_without_access_to_roots(tmp_path: Path) -> None:
    """`tests/system/test_cli.py` has an ordinary user, and root of a user namespace."""
    environ = {"XDG_RUNTIME_DIR": "/run/user/1000"}
    assert settings.runtime_directory(environ, str(tmp_path / "none")) == Path("/run/user/1000")
    assert settings.runtime_directory(environ, str(tmp_path)) is None


@pytest.mark.parametrize("environ", [{}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "relative"}])
def test_there_may_be_none(tmp_path: Path, environ: dict[str, str]) -> None:
    assert settings.runtime_directory(environ, str(tmp_path / "none")) is None
