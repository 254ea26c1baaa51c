"""Network configurations: CNI SPEC section 1 and 3, libcni's `conf.go` and `api.go` where the text is silent."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import CniError, DecodingFailureError, InvalidNetworkConfigError


def parse(fields: object, **options: Any) -> NetworkConfig:
    return conf.parse(json.dumps(fields).encode(), **options)


def listed(*plugins: object, **others: object) -> dict[str, object]:
    return {"cniVersion": "1.0.0", "name": "net", "plugins": list(plugins), **others}


def stdin(
    config: NetworkConfig, index: int = 0, *, prev_result: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Return the input of a process, and check that it equals the fields that a built-in gets."""
    fields = conf.plugin_fields(config, config.plugins[index], **options)
    if prev_result is None:
        assert gojson.loads_object(conf.plugin_stdin(fields, None)) == fields
    return gojson.loads_object(conf.plugin_stdin(fields, prev_result))


# --- parse -----------------------------------------------------------------------------------------------------------


@pytest.mark.conformance("config-23")
def test_a_single_plugin() -> None:
    raw = b'{ "name":"net","type":"bridge", "cniVersion":"0.3.1","ipam":{"type":"host-local"},"unknown":[1.0]}\n'
    config = conf.parse(raw)
    assert config.raw == raw
    assert (config.name, config.type, config.cni_version, config.is_list) == ("net", "bridge", "0.3.1", False)
    assert config.plugins[0].ipam_type == "host-local"
    assert config.plugins[0].fields["unknown"] == [1]


def test_a_list() -> None:
    raw = json.dumps(
        listed(
            {"type": "bridge", "name": "br", "capabilities": {"ips": True, "mac": False, "dns": None}},
            {"type": "tuning", "capabilities": {"mac": True}},
        )
    ).encode()
    config = conf.parse(raw)
    assert config.raw == raw
    assert config.is_list
    assert [plugin.type for plugin in config.plugins] == ["bridge", "tuning"]
    assert [plugin.name for plugin in config.plugins] == ["br", ""]
    assert config.plugins[0].capabilities == {"ips"}
    assert config.capabilities == {"ips", "mac"}
    assert (config.disable_check, config.disable_gc, config.load_only_inlined_plugins) == (False, False, False)


def test_keys_match_in_any_case_and_null_is_absent() -> None:
    config = parse({"NAME": "net", "CNIversion": "0.4.0", "Type": None, "Plugins": [{"TYPE": "x", "ipam": None}]})
    assert (config.name, config.cni_version, config.is_list, config.type) == ("net", "0.4.0", True, "x")


def test_a_type_wins_over_plugins() -> None:
    assert not parse({"name": "net", "type": "a", "plugins": [{"type": "b"}]}).is_list
    assert parse({"name": "net", "type": "", "plugins": [{"type": "b"}]}).is_list


@pytest.mark.conformance("config-2")
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "unexpected end of JSON input"),
        (b"{", "the text ends too early"),
        (b"[]", "a JSON object is needed, not an array"),
        (b"null", "not null"),
        (b"{} {}", "trailing"),
        (b'{"name":1,"type":"a"}', "name: a string is needed, not a number"),
        (b'{"name":"n","type":["a"]}', "type: a string is needed, not an array"),
        (b'{"name":"n","type":"a","cniVersion":1}', "cniVersion: a string is needed"),
        (b'{"name":"n","type":"a","cniVersions":"1.0.0"}', "cniVersions: an array is needed"),
        (b'{"name":"n","type":"a","cniVersions":[1]}', r"cniVersions\[0\]: a string is needed"),
        (b'{"name":"n","plugins":{}}', "plugins: an array is needed, not an object"),
        (b'{"name":"n","plugins":[{"type":"a"},null]}', r"plugins\[1\]: each plugin must be an object, not null"),
        (b'{"name":"n","plugins":["a"]}', r"plugins\[0\]: each plugin must be an object, not a string"),
        (b'{"name":"n","plugins":[{"type":1}]}', r"plugins\[0\]: type: a string is needed"),
        (b'{"name":"n","type":"a","capabilities":[]}', "capabilities: an object is needed"),
        (b'{"name":"n","type":"a","capabilities":{"mac":"true"}}', "capabilities.mac: a boolean is needed"),
        (b'{"name":"n","type":"a","ipam":"host-local"}', "ipam: an object is needed"),
        (b'{"name":"n","type":"a","ipam":{"type":1}}', "type: a string is needed"),
        (b'{"name":"n","plugins":[{"type":"a"}],"disableCheck":1}', "disableCheck: a boolean"),
    ],
)
def test_what_can_not_be_decoded_is_code_6(raw: bytes, message: str) -> None:
    with pytest.raises(DecodingFailureError, match=message) as caught:
        conf.parse(raw)
    assert caught.value.code == 6


@pytest.mark.parametrize(
    ("fields", "msg", "details"),
    [
        ({"type": "a"}, "missing network name", ""),
        ({"name": "", "type": "a"}, "missing network name", ""),
        ({"name": "a b", "type": "a"}, "invalid characters found in network name", "a b"),
        ({"name": "net\n", "type": "a"}, "invalid characters found in network name", "net\n"),
        ({"name": "n", "type": "../sh"}, "invalid plugin name: ../sh", "a plugin's type is a file name, no path"),
        ({"name": "n", "type": ".."}, "invalid plugin name: ..", "a plugin's type is a file name, no path"),
        ({"name": "n", "type": "a\0"}, "invalid plugin name: a\0", "a plugin's type is a file name, no path"),
        ({"name": "n"}, "CNI configuration has neither 'type' nor 'plugins'", "network 'n': name a plugin"),
        ({"name": "n", "plugins": None}, "CNI configuration has neither 'type' nor 'plugins'", None),
        ({"name": "n", "plugins": []}, "no plugins in list", "network 'n': 'plugins' is empty"),
        ({"name": "n", "plugins": [{"type": "a"}, {}]}, "plugins[1]: 'type' is missing", ""),
        ({"name": "n", "plugins": [{"type": ""}]}, "plugins[0]: 'type' is missing", ""),
        ({"name": "n", "type": "a", "cniVersion": "1.0.0.0"}, None, ""),
        ({"name": "n", "type": "a", "cniVersion": "latest"}, None, ""),
        ({"name": "n", "type": "a", "cniVersions": ["1.0.0", "x"]}, None, ""),
    ],
)
def test_what_can_not_be_used_is_code_7(fields: object, msg: str | None, details: str | None) -> None:
    with pytest.raises(InvalidNetworkConfigError) as caught:
        parse(fields)
    assert caught.value.code == 7
    assert msg is None or caught.value.msg == msg
    assert details is None or caught.value.details == details


def test_plugins_may_be_absent_where_a_folder_has_them_but_not_empty() -> None:
    config = parse({"name": "n", "cniVersion": "1.1.0"}, allow_no_plugins=True)
    assert (config.plugins, config.is_list, config.type) == ((), True, "")
    with pytest.raises(InvalidNetworkConfigError, match="no plugins in list"):
        parse({"name": "n", "plugins": []}, allow_no_plugins=True)


@pytest.mark.parametrize(
    ("single", "offered", "chosen"),
    [
        ("0.3.1", None, "0.3.1"),
        (None, None, ""),
        ("", None, ""),
        ("9.0.0", None, "9.0.0"),  # for the plugin to refuse
        ("0.3.1", ["0.4.0", "1.0.0", "2.0.0"], "1.0.0"),
        ("0.3.1", [], "0.3.1"),
        ("9.0.0", ["0.4.0"], "0.4.0"),
        ("9.0.0", ["8.0.0"], "9.0.0"),  # an empty pool leaves what is written
        (None, ["0.4.0", "0.3.1"], "0.4.0"),
        ("1.1.0", ["0.4.0", "1.0.0"], "1.1.0"),
        ("1.0.0", ["1.1.0", "1.1.1"], "1.1.0"),
        ("0.4.0", ["0.10.0", "0.9.0"], "0.10.0"),  # numbers, not text
        (None, ["2.0.0"], ""),
    ],
)
def test_choice_of_the_version(single: str | None, offered: list[str] | None, chosen: str) -> None:
    config = parse({"name": "n", "plugins": [{"type": "a"}], "cniVersion": single, "cniVersions": offered})
    assert config.cni_version == chosen


FLAGS = ["disableCheck", "disableGC", "loadOnlyInlinedPlugins"]


@pytest.mark.parametrize("key", FLAGS)
@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, True), (False, False), ("true", True), ("FALSE", False), ("True", True), ("tRUE", True), (None, False)],
)
def test_flags(key: str, value: object, expected: bool) -> None:
    config = parse(listed({"type": "a"}, **{key: value}))
    assert [config.disable_check, config.disable_gc, config.load_only_inlined_plugins] == [
        expected and key == flag for flag in FLAGS
    ]


@pytest.mark.parametrize("key", FLAGS)
@pytest.mark.parametrize("value", ["yes", "", "1", "true ", 1, 0, [], {}])
def test_flags_refused(key: str, value: object) -> None:
    with pytest.raises(DecodingFailureError, match=key):
        parse(listed({"type": "a"}, **{key: value}))


@pytest.mark.conformance("pods-7")
def test_a_missing_name_is_injected_into_the_bytes() -> None:
    for given_name in ({}, {"name": ""}, {"name": None}, {"Name": ""}):
        config = parse({**given_name, "type": "a", "keep": {"b": [1]}}, default_name="nad")
        assert config.name == "nad"
        assert json.loads(config.raw) == {"name": "nad", "type": "a", "keep": {"b": [1]}}


def test_a_name_that_is_there_stays_and_so_do_the_bytes() -> None:
    raw = b'{"NAME": "own", "type":"a"}'
    config = conf.parse(raw, default_name="nad")
    assert (config.name, config.raw) == ("own", raw)


# --- what a plugin gets ----------------------------------------------------------------------------------------------


def test_stdin_with_the_implied_version_names_it() -> None:
    assert stdin(parse({"name": "n", "type": "a"}))["cniVersion"] == "0.1.0"


def test_capabilities_are_not_removed() -> None:
    # libcni does this, against the letter of the SPEC.
    assert stdin(parse(listed({"type": "a", "capabilities": {"mac": True}})))["capabilities"] == {"mac": True}


def test_a_literal_runtime_config_stays_until_a_capability_applies() -> None:
    config = parse(listed({"type": "a", "capabilities": {"mac": True}, "RuntimeConfig": {"x": 1}}))
    assert stdin(config)["RuntimeConfig"] == {"x": 1}
    assert stdin(config, capability_args={"ips": []})["RuntimeConfig"] == {"x": 1}
    derived = stdin(config, capability_args={"mac": "m"})
    assert derived["runtimeConfig"] == {"mac": "m"}
    assert "RuntimeConfig" not in derived


def test_extra_keys() -> None:
    attachments = [{"containerID": "c", "ifname": "eth0"}]
    extra = {"cni.dev/valid-attachments": attachments, "cni.dev/attachments": attachments}
    assert stdin(parse(listed({"type": "a"})), extra=extra).items() >= extra.items()


def test_stdin_is_compact_sorted_and_escaped_as_gos() -> None:
    config = parse(listed({"type": "a", "b": "<x>", "a": {"z": 1.0, "y": None}}))
    assert conf.plugin_stdin(conf.plugin_fields(config, config.plugins[0]), None) == (
        b'{"a":{"y":null,"z":1},"b":"\\u003cx\\u003e","cniVersion":"1.0.0","name":"net","type":"a"}'
    )


def test_of_two_spellings_the_same_one_counts_for_a_built_in_and_for_a_process() -> None:
    """The bytes are sorted by key, and the last one counts; so the fields have to be."""
    config = conf.parse(b'{"name":"n","plugins":[{"type":"a","mtu":1,"MTU":2,"Ipam":{"b":1,"B":2}}]}')
    fields = conf.plugin_fields(config, config.plugins[0])
    read = gojson.loads_object(conf.plugin_stdin(fields, None))
    assert gojson.get_int(fields, "mtu") == gojson.get_int(read, "mtu") == 1
    ipam = [gojson.get_object(value, "ipam") or {} for value in (fields, read)]
    assert [gojson.get_int(value, "b") for value in ipam] == [1, 1]


# --- what is remembered ----------------------------------------------------------------------------------------------


@pytest.fixture
def remembered() -> Iterator[Callable[[], int]]:
    """Count remembered configurations; the cache is empty before the test and cleared after it."""
    conf._parsed_before.cache_clear()
    yield lambda: conf._parsed_before.cache_info().currsize
    conf._parsed_before.cache_clear()


def padded(size: int) -> bytes:
    """A configuration of so many bytes."""
    fields = b'{"name":"n","type":"a","pad":"%s"}'
    return fields % (b"x" * (size - len(fields) + 2))


@pytest.mark.usefixtures("remembered")
def test_the_same_bytes_are_read_once() -> None:
    raw = b'{"name":"n","type":"a"}'
    assert conf.parse(raw) is conf.parse(bytes(bytearray(raw)))


@pytest.mark.usefixtures("remembered")
def test_what_is_remembered_is_of_the_bytes_and_of_what_was_asked() -> None:
    without = b'{"type":"a"}'
    assert [conf.parse(without, default_name=name).name for name in ("one", "two", "one")] == ["one", "two", "one"]
    with pytest.raises(InvalidNetworkConfigError, match="missing network name"):
        conf.parse(without)
    empty = b'{"name":"n"}'
    assert conf.parse(empty, allow_no_plugins=True).plugins == ()
    with pytest.raises(InvalidNetworkConfigError, match="neither 'type' nor 'plugins'"):
        conf.parse(empty)


def test_an_error_is_not_remembered(remembered: Callable[[], int]) -> None:
    raised = []
    for _ in range(2):
        with pytest.raises(InvalidNetworkConfigError) as caught:
            conf.parse(b'{"type":"a"}')
        raised.append(caught.value)
    # Each call raises a new exception: a traceback grows when an exception is raised again.
    assert raised[0] is not raised[1]
    assert remembered() == 0


def test_what_is_large_is_not_remembered(remembered: Callable[[], int]) -> None:
    limit = conf._REMEMBERED_MAX_BYTES
    small, large = padded(limit), padded(limit + 1)
    assert (len(small), len(large)) == (limit, limit + 1)
    assert conf.parse(large) == conf.parse(large)
    assert remembered() == 0
    conf.parse(small)
    assert remembered() == 1


def test_what_is_remembered_is_bounded(remembered: Callable[[], int]) -> None:
    """Whoever may write NetworkAttachmentDefinitions can't make the daemon keep more than so many."""
    limit = conf._parsed_before.cache_info().maxsize
    assert limit == 256
    for number in range(limit + 10):
        conf.parse(b'{"name":"n%d","type":"a"}' % number)
    assert remembered() == limit


@pytest.mark.usefixtures("remembered")
def test_nothing_that_is_made_of_a_remembered_configuration_changes_it() -> None:
    raw = json.dumps(listed({"type": "a", "capabilities": {"mac": True}, "args": {"cni": {"x": 1}}, "k": {}})).encode()
    config = conf.parse(raw)
    before = json.dumps([plugin.fields for plugin in config.plugins])
    fields = conf.plugin_fields(config, config.plugins[0], capability_args={"mac": "m"}, extra={"type": "b"})
    conf.plugin_stdin(fields, {})
    conf.with_plugins(config, (b'{"type":"b"}',))
    conf.with_plugin_fields(config, {"deviceID": "d"}, {"x": 2})
    replace(config, cni_version="0.4.0")
    again = conf.parse(raw)
    assert again is config
    assert json.dumps([plugin.fields for plugin in again.plugins]) == before
    assert again == conf._parse(raw, "", False)


# --- changed networks ------------------------------------------------------------------------------------------------


def test_with_plugins_appends_and_the_bytes_are_complete() -> None:
    config = conf.with_plugins(parse(listed({"type": "a"}, keep=1)), (b'{"type":"b"}',))
    assert [plugin.type for plugin in config.plugins] == ["a", "b"]
    assert conf.parse(config.raw) == config
    assert json.loads(config.raw)["keep"] == 1


def test_with_plugins_of_nothing_is_the_same_object() -> None:
    config = parse(listed({"type": "a"}))
    assert conf.with_plugins(config, ()) is config


@pytest.mark.parametrize(("extra", "code"), [(b"{", 6), (b"[]", 6), (b"{}", 7)])
def test_with_plugins_refuses(extra: bytes, code: int) -> None:
    with pytest.raises(CniError) as caught:
        conf.with_plugins(parse(listed({"type": "a"})), (extra,))
    assert caught.value.code == code


@pytest.mark.conformance("config-15")
@pytest.mark.parametrize("single", [True, False])
def test_fields_are_set_in_every_plugin(single: bool) -> None:
    plugin = {"type": "a", "deviceid": "old", "args": {"cni": {"x": 1, "y": 1}, "other": 2}}
    fields = {"name": "net", **plugin} if single else listed(plugin, {"type": "b"})
    config = conf.with_plugin_fields(parse(fields), {"deviceID": "0000:00:01.0"}, {"y": 2, "z": 3})
    assert conf.parse(config.raw) == config
    first = config.plugins[0].fields
    assert first["deviceID"] == "0000:00:01.0"
    assert "deviceid" not in first
    assert first["args"] == {"cni": {"x": 1, "y": 2, "z": 3}, "other": 2}
    if not single:
        assert config.plugins[1].fields == {"type": "b", "deviceID": "0000:00:01.0", "args": {"cni": {"y": 2, "z": 3}}}


@pytest.mark.conformance("config-15")
def test_fields_of_other_spellings_are_merged_too() -> None:
    config = parse({"name": "n", "type": "a", "Args": {"CNI": {"x": 1}}})
    assert conf.with_plugin_fields(config, {}, {"y": 2}).plugins[0].fields == {
        "name": "n",
        "type": "a",
        "args": {"cni": {"x": 1, "y": 2}},
    }


def test_fields_keep_a_version_that_was_chosen_for_the_network() -> None:
    config = replace(parse(listed({"type": "a"})), cni_version="0.4.0")
    assert conf.with_plugin_fields(config, {"k": 1}, {}).cni_version == "0.4.0"


def test_no_fields_is_the_same_object() -> None:
    config = parse(listed({"type": "a"}))
    assert conf.with_plugin_fields(config, {}, {}) is config


@pytest.mark.weak_spot(23)
@pytest.mark.parametrize("args", ["x", [], {"cni": []}, {"cni": "x"}])
def test_args_of_another_shape_are_refused(args: object) -> None:
    with pytest.raises(DecodingFailureError, match="an object is needed"):
        conf.with_plugin_fields(parse({"name": "n", "type": "a", "args": args}), {}, {"x": 1})


@pytest.mark.parametrize(
    "raw",
    [
        b'{"name":"n","plugins":[{"type":"first","Type":"second"}]}',
        b'{"name":"n","type":"first","Type":"second"}',
        b'{"type":"first","Type":"second"}',
    ],
)
def test_of_two_spellings_of_a_key_the_same_one_counts_before_and_after(raw):
    config = conf.parse(raw, default_name="n")
    assert conf.parse(config.raw).type == config.type
    changed = conf.with_plugin_fields(config, {}, {"a": 1})
    assert conf.parse(changed.raw).type == changed.type == config.type
