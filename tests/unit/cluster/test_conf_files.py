"""CNI configurations on the node's disk: libcni's `conf.go`, NPWG multi-network SPEC 3.4.1."""

import json
import os
from pathlib import Path

import pytest

from multus_daemon.cluster import conf_files
from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError, IoFailureError


def write(path: Path, fields: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return path


def single(name: str, plugin: str = "bridge") -> dict[str, object]:
    return {"cniVersion": "1.0.0", "name": name, "type": plugin}


def listed(name: str, *plugins: str, **others: object) -> dict[str, object]:
    return {"cniVersion": "1.0.0", "name": name, "plugins": [{"type": plugin} for plugin in plugins], **others}


def types(config: NetworkConfig | None) -> list[str]:
    assert config is not None
    return [plugin.type for plugin in config.plugins]


# --- by name ---------------------------------------------------------------------------------------------------------


def by_name(directory: Path, name: str) -> NetworkConfig | None:
    return NodeConfFiles().by_name(str(directory), name)


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        ({"20.conf": "second", "10.conf": "first"}, "first"),
        ({"10.json": "first", "20.conf": "second"}, "first"),
        ({"99.conflist": "list", "10.conf": "single"}, "list"),  # lists come before single configurations
        ({"99.conflist": "b", "98.conflist": "a"}, "a"),
        ({"10.txt": "x", "10.conf.bak": "y", ".hidden.conf.1234": "z", "99.conf": "chosen"}, "chosen"),
        ({"10.CONF": "x", "99.conf": "chosen"}, "chosen"),
    ],
)
def test_order(tmp_path: Path, files: dict[str, str], chosen: str) -> None:
    for name, plugin in files.items():
        write(tmp_path / name, listed("n", plugin) if name.endswith(".conflist") else single("n", plugin))
    assert types(by_name(tmp_path, "n")) == [chosen]


def test_names_are_compared_exactly(tmp_path: Path) -> None:
    write(tmp_path / "a.conf", single("Net"))
    assert by_name(tmp_path, "net") is None


@pytest.mark.conformance("pods-15")
def test_no_such_network_or_directory(tmp_path: Path) -> None:
    write(tmp_path / "a.conf", single("a"))
    write(tmp_path / "b.conf", {"type": "nameless"})
    assert by_name(tmp_path, "x") is None
    assert by_name(tmp_path / "none", "x") is None


@pytest.mark.conformance("pods-8")
def test_a_broken_file_before_the_match_is_an_error_behind_it_is_not(tmp_path: Path) -> None:
    write(tmp_path / "10.conf", single("a"))
    write(tmp_path / "20.conf", "{ broken")
    write(tmp_path / "30.conf", single("c"))
    assert types(by_name(tmp_path, "a")) == ["bridge"]
    for name in ("c", "x"):
        with pytest.raises(InvalidNetworkConfigError, match=r"20\.conf: ") as caught:
            by_name(tmp_path, name)
        assert repr(name) in caught.value.details


def test_a_file_that_is_json_but_no_usable_network_is_no_hindrance_for_others(tmp_path: Path) -> None:
    write(tmp_path / "10.conf", {"name": "a"})
    write(tmp_path / "20.conf", single("b"))
    assert types(by_name(tmp_path, "b")) == ["bridge"]
    with pytest.raises(
        InvalidNetworkConfigError, match=r"neither 'type' nor 'plugins'|no plugin configs found"
    ) as caught:
        by_name(tmp_path, "a")
    assert str(tmp_path / "10.conf") in caught.value.msg


@pytest.mark.conformance("pods-15", "pods-23")
@pytest.mark.parametrize("directory", ["/etc/\0", "/dev/null", "/etc/" + "d" * 256])
def test_what_is_no_directory(directory: str) -> None:
    with pytest.raises(CniError, match=r"is not a path|can't be listed"):
        NodeConfFiles().by_name(directory, "a")


def test_a_directory_with_a_configurations_name_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "10.conf").mkdir()
    write(tmp_path / "20.conf", single("a"))
    assert types(by_name(tmp_path, "a")) == ["bridge"]


# --- at a path -------------------------------------------------------------------------------------------------------


def at_path(path: Path) -> NetworkConfig:
    return NodeConfFiles().at_path(str(path))


def test_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "any.name", single("a"))
    found = at_path(path)
    assert (found.name, found.raw) == ("a", path.read_bytes())


def test_a_link_to_a_file(tmp_path: Path) -> None:
    write(tmp_path / "target", single("a"))
    (tmp_path / "10.conf").symlink_to("target")
    assert (at_path(tmp_path / "10.conf")).name == "a"
    assert (at_path(tmp_path)).name == "a"


def test_the_lexically_first_file_of_a_directory(tmp_path: Path) -> None:
    for name, network in (("20.conflist", "c"), ("10.json", "b"), ("00.txt", "a")):
        write(tmp_path / name, listed(network, "x"))
    assert (at_path(tmp_path)).name == "b"


def test_an_empty_directory(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", single("a"))
    with pytest.raises(InvalidNetworkConfigError, match="no net configurations found in") as caught:
        at_path(tmp_path)
    assert str(tmp_path) in caught.value.msg


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    large, fifo, loop = tmp_path / "large.conf", tmp_path / "fifo.conf", tmp_path / "loop.conf"
    large.write_bytes(b" " * (conf_files.CONF_MAX_BYTES + 1))
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    for path, reason in (
        (tmp_path / "none.conf", "No such file or directory"),
        (large, "larger than 1048576 bytes"),
        (fifo, "not a regular file"),
        (loop, "Too many levels of symbolic links"),
    ):
        with pytest.raises(IoFailureError) as caught:
            at_path(path)
        assert caught.value.msg == f"{path}: can't be read: {reason}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything; run the tests as another user for this one")
def test_a_file_without_permission(tmp_path: Path) -> None:
    (tmp_path / "a.conf").touch(mode=0)
    with pytest.raises(IoFailureError, match="Permission denied"):
        at_path(tmp_path)


def test_a_path_with_a_nul_byte() -> None:
    with pytest.raises(InvalidNetworkConfigError, match="is not a path"):
        NodeConfFiles().at_path("/etc/\0")


def test_errors_in_the_file_name_it(tmp_path: Path) -> None:
    for text, code in (("{", 6), ('{"name":"a b","type":"x"}', 7), ('{"name":"a","plugins":[]}', 7)):
        path = write(tmp_path / "a.conf", text)
        with pytest.raises(CniError) as caught:
            at_path(path)
        assert caught.value.code == code
        assert f"({path})" in caught.value.msg


# --- side-loaded plugins ---------------------------------------------------------------------------------------------


def test_plugins_of_the_folder_named_like_the_network_are_appended_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "10.conflist", listed("net", "a"))
    write(tmp_path / "net" / "20.conf", {"type": "c"})
    write(tmp_path / "net" / "10.conf", {"type": "b"})
    for other in ("30.json", "30.conflist", "30.txt"):  # libcni takes .conf only
        write(tmp_path / "net" / other, {"type": "never"})
    write(tmp_path / "10" / "10.conf", {"type": "never"})
    for found in (at_path(path), at_path(tmp_path), by_name(tmp_path, "net")):
        assert types(found) == ["a", "b", "c"]
        assert found is not None
        assert types(conf.parse(found.raw)) == ["a", "b", "c"]  # complete without the folder


def test_a_list_may_have_all_its_plugins_in_the_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "10.conflist", {"name": "net", "cniVersion": "1.1.0"})
    with pytest.raises(InvalidNetworkConfigError, match="no plugin configs found"):
        at_path(path)
    write(tmp_path / "net" / "10.conf", {"type": "b"})
    assert types(at_path(path)) == ["b"]


@pytest.mark.parametrize("flag", [True, "true"])
def test_only_inlined_plugins(tmp_path: Path, flag: object) -> None:
    write(tmp_path / "net" / "10.conf", {"type": "b"})
    path = write(tmp_path / "10.conflist", listed("net", "a", loadOnlyInlinedPlugins=flag))
    assert types(at_path(path)) == ["a"]
    write(path, {"name": "net", "loadOnlyInlinedPlugins": flag})
    with pytest.raises(InvalidNetworkConfigError, match="no plugin configs found"):
        at_path(path)


def test_a_single_configuration_has_no_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "10.conf", single("net"))
    write(tmp_path / "net" / "10.conf", {"type": "b"})
    assert types(at_path(path)) == ["bridge"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"type":"a/b"}'])
def test_a_broken_plugin_in_the_folder(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "10.conflist", listed("net", "a"))
    write(tmp_path / "net" / "10.conf", {"type": "b"})
    broken = write(tmp_path / "net" / "20.conf", text)
    with pytest.raises(CniError) as caught:
        at_path(path)
    assert f"({broken}) ({path})" in caught.value.msg
    with pytest.raises(CniError) as caught:
        NodeConfFiles().plugins_beside(str(path), "net")
    assert caught.value.msg.endswith(f"({broken})")


def test_plugins_beside_a_file_or_in_a_directory(tmp_path: Path) -> None:
    path = write(tmp_path / "10.conf", single("net"))
    expected = tuple(
        write(tmp_path / "chain" / name, {"type": plugin}).read_bytes()
        for name, plugin in (("1.conf", "a"), ("2.conf", "b"))
    )
    write(tmp_path / "chain" / "3.conflist", listed("net", "never"))
    files = NodeConfFiles()
    for reference in (path, tmp_path, tmp_path / "gone.conf"):
        assert files.plugins_beside(str(reference), "chain") == expected
    assert files.plugins_beside(str(path), "none") == ()


def test_a_folder_with_too_many_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conf_files, "PLUGINS_MAX", 2)
    path = write(tmp_path / "10.conflist", listed("net", "a"))
    for name in "bc":
        write(tmp_path / "net" / f"{name}.conf", {"type": name})
    assert types(at_path(path)) == ["a", "b", "c"]
    write(tmp_path / "net" / "d.conf", {"type": "d"})
    with pytest.raises(InvalidNetworkConfigError, match="net has 3 plugins, and a chain may have at most 2"):
        at_path(path)


@pytest.mark.parametrize("name", ["..", ".", "../x", "/etc", "a/b", "", "a\0", "a b"])
def test_a_folders_name_is_a_networks_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidNetworkConfigError, match="network name"):
        NodeConfFiles().plugins_beside(str(tmp_path / "10.conf"), name)


def test_plugins_beside_no_path() -> None:
    with pytest.raises(InvalidNetworkConfigError, match="is not a path"):
        NodeConfFiles().plugins_beside("/etc/\0/x", "chain")


def test_files_are_read_anew_each_time(tmp_path: Path) -> None:
    path = write(tmp_path / "10.conf", single("a"))
    files = NodeConfFiles()
    assert (files.at_path(str(path))).name == "a"
    write(path, single("b"))
    assert (files.at_path(str(path))).name == "b"
