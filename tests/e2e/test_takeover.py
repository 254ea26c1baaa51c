"""Our daemon in the place of upstream's: pods that the real one attached are ours to check, keep and delete."""

from __future__ import annotations

import json
import signal
import threading
from typing import Any, Final

import pytest

from tests.e2e.takeover import INTERFACES, PODS, Make

RUNS: Final = ("Multus, thick",)
pytest_plugins = ["tests.e2e.kube_fixtures", "tests.e2e.takeover_fixtures"]


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "number", "shim", "settings"),
    [
        ("conf", signal.SIGTERM, "ours", {}),
        ("conflist", signal.SIGKILL, "upstream", {}),
        ("conflist", signal.SIGTERM, "ours", {"builtinPlugins": "off"}),
    ],
    ids=["conf-sigterm", "conflist-sigkill-upstream-shim", "conflist-sigterm-binaries"],
)
@pytest.mark.weak_spot(1, 6)
def test_live_pods_are_checked_kept_and_deleted(
    takeover: Make, kind: str, number: signal.Signals, shim: str, settings: dict[str, Any]
) -> None:
    with takeover(kind, **settings) as made:
        links = made.node.links()
        made.attach(PODS)
        assert made.pod_links() == INTERFACES
        assert made.rules(), "there is something to be left"
        before = made.state()
        made.take_over(number)
        assert made.state() == before
        # Not of those with port mappings: CHECK of portmap 1.1.1 wants IPv6 rules also for a pod without IPv6.
        for pod in ("lan", "two"):
            checked = made.runtime("CHECK", pod, by=shim)
            assert checked.code == 0, checked.stdout
        valid = [{"containerID": f"c-{pod}", "ifname": "eth0"} for pod in PODS]
        collected = made.collect(valid)
        assert collected.code == 0, collected.stdout
        for pod in PODS:
            again = made.runtime("ADD", pod, by=shim)
            assert again.code == 0, again.stdout
            assert [address["address"] for address in again.json["ips"]] == made.addresses(pod, "eth0")
        assert made.state() == before
        for pod in PODS:
            deleted = made.runtime("DEL", pod, by=shim)
            assert (deleted.code, deleted.stdout) == (0, b"")
        made.assert_clean(links)
        # Again is no failure.
        assert made.runtime("DEL", "two", by=shim).code == 0


def test_what_the_api_server_has_forgotten_is_deleted_all_the_same(takeover: Make) -> None:
    with takeover("conflist") as made:
        links = made.node.links()
        made.attach(PODS)
        made.server.delete_pod("asked", made.namespace)
        for name in ("unversioned", "macvlan", "addressed", "ports"):
            made.server.delete("k8s.cni.cncf.io/v1", "NetworkAttachmentDefinition", name, made.namespace)
        # Without the cluster network's configuration our daemon is not ready: DEL needs neither.
        (made.node.root / "net.d" / "10-pods.conflist").unlink()
        made.take_over(ready=False)
        for pod in PODS:
            assert made.runtime("DEL", pod).code == 0
        made.assert_clean(links)


def test_pods_whose_namespace_is_gone(takeover: Make) -> None:
    with takeover("conflist") as made:
        links = made.node.links()
        made.attach(PODS)
        made.take_over()
        made.die("lan")
        made.die("alone")
        kept = [{"containerID": f"c-{pod}", "ifname": "eth0"} for pod in PODS if pod != "lan"]
        assert made.collect(kept).code == 0
        files = made.node.leftovers()
        assert [path for path in files if "c-lan" in path or path.startswith("networks/macvlan")] == []
        assert made.pod_links() == {pod: INTERFACES[pod] for pod in ("two", "asked")}
        for pod in ("alone", "two", "asked"):
            assert made.runtime("DEL", pod).code == 0
        # Without a namespace the reference ptp leaves its rules of ipMasq, whoever calls it.
        made.assert_clean(links, rules=[line for line in made.rules() if "CNI-DN-" not in line])


@pytest.mark.weak_spot(28)
def test_files_that_a_crash_cut_off_or_lost(takeover: Make) -> None:
    """Whatever is left of two sources is enough to delete the pod."""
    with takeover("conflist") as made:
        links = made.node.links()
        damaged = ("truncated", "emptied", "garbage", "unrecorded", "resultless")
        made.attach({pod: PODS["asked"] if pod == "truncated" else PODS["two"] for pod in damaged})
        cache = made.node.cni_dir
        whole = (cache / "c-truncated").read_bytes()
        (cache / "c-truncated").write_bytes(whole[: len(whole) // 2])
        (cache / "c-emptied").write_bytes(b"")
        (cache / "c-garbage").write_bytes(b"\0" * 4096)
        (cache / "c-unrecorded").unlink()
        for path in (cache / "results").glob("*-c-resultless-*"):
            path.unlink()
        made.take_over()
        before = made.state()
        for pod in ("truncated", "emptied", "garbage"):
            if pod != "truncated":
                checked = made.runtime("CHECK", pod)
                assert checked.code == 0, checked.stdout
            again = made.runtime("ADD", pod)
            assert again.code == 0, again.stdout
            assert [address["address"] for address in again.json["ips"]] == made.addresses(pod, "eth0")
        refused = made.runtime("ADD", "unrecorded")
        assert refused.code == 1
        assert "already exists in the pod's network namespace" in refused.json["msg"]
        checked = made.runtime("CHECK", "resultless")
        assert (checked.code, checked.json["code"]) == (1, 3)
        assert made.state() == before
        for pod in damaged:
            deleted = made.runtime("DEL", pod)
            assert deleted.code == 0, (pod, deleted.stdout)
        made.assert_clean(links)


def test_an_add_that_was_cut_off_is_undone(takeover: Make) -> None:
    """Upstream writes its list before the first plugin runs; killed in the middle it leaves a pod half attached."""
    with takeover("conflist") as made:
        links = made.node.links()
        made.node.plugin("hangs", "touch $0.called; exec sleep 60")
        made.definition("hangs", json.dumps({"cniVersion": "1.0.0", "name": "hangs", "type": "hangs"}))
        made.pod("half", "unversioned,hangs")
        add = threading.Thread(target=made.runtime, args=("ADD", "half"), kwargs={"by": "upstream"})
        add.start()
        called = made.node.bin_dir / "hangs.called"
        made.node.wait_until(called.exists, "the second network's plugin runs")
        made.upstream.stop(signal.SIGKILL)
        add.join()
        made.node.plugin("hangs", "exit 0")
        assert made.pod_links() == {"half": ["eth0", "lo", "net1"]}
        made.node.start()
        checked = made.runtime("CHECK", "half")
        assert (checked.code, checked.json["code"]) == (1, 3)
        assert made.runtime("DEL", "half").code == 0
        made.assert_clean(links)
