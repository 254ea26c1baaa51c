import base64
import json

import pytest

from multus_daemon.cluster.kube.credentials import TOKEN_SECONDS, InCluster, Kubeconfig, TokenFile
from multus_daemon.cluster.kube.errors import ConfigurationError


def write(path, user, cluster=None, **changes):
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "https://10.0.0.1:6443", **(cluster or {})}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
        **changes,
    }
    path.write_text(json.dumps(config))
    return path


# --- token files ---


def test_token_is_read_again_when_it_is_old_or_when_asked(tmp_path, monkeypatch):
    path, now = tmp_path / "token", 0.0
    monkeypatch.setattr("multus_daemon.cluster.kube.credentials.time.monotonic", lambda: now)
    path.write_text("one\n")
    file = TokenFile(path)
    assert file.token() == "one"
    path.write_text("two\n")
    assert file.token() == "one"
    assert file.token(fresh=True) == "two"
    path.write_text("three")
    now = TOKEN_SECONDS
    assert file.token() == "three"


@pytest.mark.parametrize("content", ["", "\n", "ä"])
def test_a_token_that_can_not_be_used_leaves_the_last(tmp_path, content):
    path = tmp_path / "token"
    path.write_text("one")
    file = TokenFile(path)
    assert file.token() == "one"
    path.write_text(content)
    assert file.token(fresh=True) == "one"
    path.unlink()
    assert file.token(fresh=True) == "one"
    with pytest.raises(ConfigurationError, match=f"token in {path} can't be read"):
        TokenFile(path).token()


# --- a kubeconfig for others ---


def test_a_kubeconfig_for_a_certificate_is_of_the_same_cluster_and_has_nothing_else(tmp_path):
    source = write(tmp_path / "bootstrap", {"token": "secret"}, {"certificate-authority": "pki/ca.crt"})
    content = Kubeconfig(source).for_certificate(tmp_path / "current.pem")
    assert b"secret" not in content
    found = json.loads(content)
    [cluster], [user] = found["clusters"], found["users"]
    assert cluster["cluster"] == {
        "server": "https://10.0.0.1:6443",
        "certificate-authority": str(tmp_path / "pki" / "ca.crt"),
    }
    assert user["user"] == dict.fromkeys(("client-certificate", "client-key"), str(tmp_path / "current.pem"))
    made = tmp_path / "made"
    made.write_bytes(content)
    assert Kubeconfig(made).for_certificate(tmp_path / "current.pem") == content


def test_a_kubeconfig_for_a_certificate_needs_one_to_begin_with(tmp_path):
    with pytest.raises(ConfigurationError, match="bootstrap can't be used"):
        Kubeconfig(tmp_path / "bootstrap").for_certificate(tmp_path / "current.pem")
    (tmp_path / "bootstrap").write_text("users: []")
    with pytest.raises(ConfigurationError, match="bootstrap can't be used"):
        Kubeconfig(tmp_path / "bootstrap").for_certificate(tmp_path / "current.pem")


# --- in cluster ---

ENVIRON = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}


def test_in_cluster(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "ca.crt").write_text("CA")
    access = InCluster(ENVIRON, tmp_path / "token", tmp_path / "ca.crt").load()
    assert access.configuration.host == "https://[fd00::1]:443"
    assert access.configuration.ssl_ca_cert == str(tmp_path / "ca.crt")
    assert access.header() == "Bearer secret"
    assert "secret" not in repr(access)


@pytest.mark.parametrize("missing", ["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "token", "ca.crt"])
def test_not_in_a_cluster(tmp_path, missing):
    for name in {"token", "ca.crt"} - {missing}:
        (tmp_path / name).write_text("x")
    environ = {key: value for key, value in ENVIRON.items() if key != missing}
    with pytest.raises(ConfigurationError, match=r"service account.*kubeconfig"):
        InCluster(environ, tmp_path / "token", tmp_path / "ca.crt").load()


# --- kubeconfig ---


def test_token(tmp_path):
    access = Kubeconfig(write(tmp_path / "k", {"token": "abc\n"})).load()
    assert access.configuration.host == "https://10.0.0.1:6443"
    assert access.header() == "Bearer abc"


def test_token_file_is_relative_to_the_kubeconfig_and_read_again(tmp_path):
    (tmp_path / "tok").write_text("one")
    access = Kubeconfig(write(tmp_path / "k", {"tokenFile": "tok"})).load()
    assert access.header() == "Bearer one"
    (tmp_path / "tok").write_text("two")
    assert access.header(fresh=True) == "Bearer two"


def test_token_goes_before_token_file(tmp_path):
    (tmp_path / "tok").write_text("one")
    access = Kubeconfig(write(tmp_path / "k", {"tokenFile": "tok", "token": "two"})).load()
    assert access.header() == "Bearer two"


def test_basic_and_nothing(tmp_path):
    access = Kubeconfig(write(tmp_path / "k", {"username": "a", "password": "b"})).load()
    assert access.header() == "Basic " + base64.b64encode(b"a:b").decode()
    assert Kubeconfig(write(tmp_path / "k", {})).load().header() == ""
    assert Kubeconfig(write(tmp_path / "k", {}, users=None)).load().header() == ""


def test_certificates_by_file_and_by_data(tmp_path):
    for name in ("cert", "key", "ca"):
        (tmp_path / name).write_text(name)
    by_file = {"client-certificate": "cert", "client-key": "key"}
    found = Kubeconfig(write(tmp_path / "k", by_file, {"certificate-authority": "ca"})).load().configuration
    assert (found.cert_file, found.key_file) == (str(tmp_path / "cert"), str(tmp_path / "key"))
    assert found.ssl_ca_cert == str(tmp_path / "ca")
    data = base64.b64encode(b"PEM of a test").decode()
    by_data = {"client-certificate-data": data, "client-key-data": data}
    found = Kubeconfig(write(tmp_path / "k", by_data)).load().configuration
    with open(found.cert_file, "rb") as file:
        assert file.read() == b"PEM of a test"


def test_a_certificate_takes_the_place_of_all_credentials(tmp_path):
    (tmp_path / "ca").write_text("CA")
    path = write(tmp_path / "k", {"token": "abc", "username": "a", "password": "b"}, {"certificate-authority": "ca"})
    access = Kubeconfig(path, certificate=tmp_path / "current.pem").load()
    assert access.header() == ""
    assert access.configuration.cert_file == access.configuration.key_file == str(tmp_path / "current.pem")
    assert access.configuration.ssl_ca_cert == str(tmp_path / "ca")


@pytest.mark.conformance("pods-17")
@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "5",
        "{",
        "token: {tok-secret: [",
        "current-context: x\ncontexts: []\nusers: []\nclusters: []",
        "current-context: x\ncontexts: [{name: x, context: {cluster: c, user: u}}]\nclusters: []\n"
        "users: [{name: u, user: {token: tok-secret}}]",
        "current-context: x\ncontexts: [{name: x, context: {cluster: c, user: u}}]\n"
        "clusters: [{name: c, cluster: {}}]\n"
        "users: [{name: u, user: {token: tok-secret, exec: {args: [tok-secret]}}}]",
    ],
)
def test_kubeconfigs_that_are_none(tmp_path, content):
    (tmp_path / "k").write_text(content)
    with pytest.raises(ConfigurationError, match=f"kubeconfig {tmp_path}/k can't be used") as caught:
        Kubeconfig(tmp_path / "k").load()
    assert "tok-secret" not in str(caught.value)


def test_no_kubeconfig(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file"):
        Kubeconfig(tmp_path / "k").load()


# --- contexts, and several files ---


def test_another_context(tmp_path):
    contexts = [
        {"name": "x", "context": {"cluster": "c", "user": "u"}},
        {"name": "y", "context": {"cluster": "d", "user": "v", "namespace": "mine"}},
    ]
    clusters = [{"name": name, "cluster": {"server": f"https://{name}:6443"}} for name in "cd"]
    users = [{"name": name, "user": {"token": f"of {name}"}} for name in "uv"]
    path = write(tmp_path / "k", {}, contexts=contexts, clusters=clusters, users=users)
    access = Kubeconfig(path, context="y").load()
    assert (access.configuration.host, access.header()) == ("https://d:6443", "Bearer of v")
    assert Kubeconfig(path).load().configuration.host == "https://c:6443"
    assert (Kubeconfig(path, context="y").namespace(), Kubeconfig(path).namespace()) == ("mine", "")
    for read in (Kubeconfig(path, context="z").load, Kubeconfig(path, context="z").namespace):
        with pytest.raises(
            ConfigurationError, match=rf"kubeconfig {path} can't be used: it has no context 'z', but x, y"
        ):
            read()


def test_of_several_files_each_adds_what_is_not_there_yet(tmp_path):
    """kubectl reads the variable KUBECONFIG like this; paths are relative to the file that names them."""
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    one = first / "k"
    one.write_text(json.dumps({"contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}]}))
    (second / "token").write_text("from the second")
    (second / "ca").write_text("CA")
    two = write(second / "k", {"tokenFile": "token"}, {"certificate-authority": "ca"})
    three = write(tmp_path / "k", {"token": "of the last"}, {"server": "https://last"}, **{"current-context": "other"})
    access = Kubeconfig(one, others=(two, three)).load()
    assert access.header() == "Bearer from the second"
    assert access.configuration.host == "https://10.0.0.1:6443"
    assert access.configuration.ssl_ca_cert == str(second / "ca")


def test_a_program_for_credentials_is_relative_to_its_file(tmp_path):
    directory = tmp_path / "a"
    directory.mkdir()
    program = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./login", "interactiveMode": "Never"}
    path = write(directory / "k", {"exec": program})
    other = write(tmp_path / "k", {"exec": {**program, "command": "login"}}, users=[])
    found = Kubeconfig(path, others=(other,))._document()
    assert found["users"][0]["user"]["exec"]["command"] == str(directory / "login")


@pytest.mark.parametrize("content", ["5", "[]", '{"contexts": 5}', '{"contexts": [{}]}'])
def test_a_second_file_that_is_none_is_named(tmp_path, content):
    path = write(tmp_path / "k", {"token": "t"})
    other = tmp_path / "other"
    other.write_text(content)
    with pytest.raises(ConfigurationError, match=rf"kubeconfig {path}:{other} can't be used"):
        Kubeconfig(path, others=(other,)).load()
