"""The archive of a bug report: what is written can be read, nothing exceeds a limit, and a hostile one is refused."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from typing import Any

import pytest

from multus_tools import bundle_file
from multus_tools.bundle_file import Archive, BundleError
from multus_tools.scrub import REMOVED, Scrubber

SECRET = "s3cr3t-0f-s0meb0dy"


def written(fill: Any, *, most: int = bundle_file.NODE_MAX_BYTES, known: tuple[str, ...] = (), **index: Any) -> bytes:
    """An archive that `fill` fills."""
    output = io.BytesIO()
    archive = Archive(output, "top", most=most, scrubber=Scrubber(known))
    fill(archive)
    archive.close({"schema": bundle_file.SCHEMA, "daemon": "", **index})
    return output.getvalue()


def packed(files: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> bytes:
    """An archive that no program of ours would write."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.type, member.linkname = len(data), kind, "/etc/passwd"
            tar.addfile(member, io.BytesIO(data))
    return output.getvalue()


GOOD = {
    "top/index.json": json.dumps({"schema": bundle_file.SCHEMA}).encode(),
    "top/removed.json": b'{"removals": []}',
}


def test_files_are_written_without_secrets_and_listed() -> None:
    def fill(archive: Archive) -> None:
        archive.json("cni/blue.conf", {"type": "x", "password": SECRET})
        archive.text("log.txt", f"line\nplugin says {SECRET} é\n")
        archive.lacks("answers/doctor.json", f"token={SECRET}")

    found = bundle_file.unpack(written(fill, daemon="no daemon", node="n1"))
    assert json.loads(found.files["cni/blue.conf"]) == {"type": "x", "password": REMOVED}
    assert found.files["log.txt"].decode() == f"line\nplugin says {REMOVED} é\n"
    assert found.known.daemon == "no daemon"
    assert [(item["file"], item["key"]) for item in found.removed] == [
        ("cni/blue.conf", "password"),
        ("log.txt", "line 2"),
    ]
    names = [item["name"] for item in found.index["files"]]
    assert names == ["cni/blue.conf", "log.txt", "removed.json"]
    assert found.index["missing"] == [{"name": "answers/doctor.json", "problem": f"token={REMOVED}"}]
    assert (found.index["node"], found.index["removed"]) == ("n1", 2)


def test_modes_and_directory_are_private() -> None:
    data = written(lambda archive: archive.text("../../etc/pass wd", "x"))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tar.getmembers()
    assert [item.name for item in members] == ["top/_./_./etc/pass_wd", "top/removed.json", "top/index.json"]
    assert {item.mode for item in members} == {0o600}


def test_two_files_of_one_name_both_stay() -> None:
    def fill(archive: Archive) -> None:
        archive.text("a b", "1")
        archive.text("a/b", "2")
        archive.text("a_b", "3")

    assert bundle_file.unpack(written(fill)).files == {"a_b": b"1", "a/b": b"2", "a_b_": b"3"}


def test_a_long_log_is_cut_to_its_end_and_other_files_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_file, "FILE_MAX_BYTES", 8 * 1024)
    lines = "".join(f"line {number}\n" for number in range(1_000))

    def fill(archive: Archive) -> None:
        archive.json("large.json", lines)
        archive.text("log.txt", lines)

    found = bundle_file.unpack(written(fill))
    assert found.files.keys() == {"log.txt"}
    assert len(found.files["log.txt"]) <= bundle_file.FILE_MAX_BYTES
    assert found.files["log.txt"].startswith(b"line ")
    assert found.files["log.txt"].endswith(b"line 999\n")
    assert [item["name"] for item in found.index["missing"]] == ["large.json"]


def test_an_archive_has_a_size() -> None:
    noise = random.Random(1)

    def fill(archive: Archive) -> None:
        for number in range(20):
            archive.text(f"{number}.txt", noise.randbytes(30_000).hex())

    data = written(fill, most=150_000)
    found = bundle_file.unpack(data)
    assert len(data) < 150_000 + 100_000
    missing = [item["name"] for item in found.index["missing"]]
    assert missing
    assert len(found.files) + len(missing) == 20


def test_removals_beyond_a_number_are_counted() -> None:
    many = [{"token": f"{number}x"} for number in range(bundle_file.REMOVALS_MAX + 10)]
    data = written(lambda archive: archive.json("a.json", many))
    found = bundle_file.unpack(data)
    assert len(found.removed) == bundle_file.REMOVALS_MAX
    assert found.index["removed"] == bundle_file.REMOVALS_MAX + 10


def test_the_archive_of_a_node_becomes_part_of_that_of_a_cluster() -> None:
    def fill(archive: Archive) -> None:
        archive.json("a.json", {"psk": SECRET})
        archive.lacks("b.json", "it hangs")

    node = bundle_file.unpack(written(fill))
    found = bundle_file.unpack(written(lambda archive: archive.take(node, "nodes/n1")))
    assert found.files.keys() == {"nodes/n1/a.json", "nodes/n1/index.json"}
    assert [item["file"] for item in found.removed] == ["nodes/n1/a.json"]
    assert found.known.missing == [{"name": "nodes/n1/b.json", "problem": "it hangs"}]


def test_nothing_is_added_to_a_closed_archive() -> None:
    output = io.BytesIO()
    archive = Archive(output, "top", most=bundle_file.NODE_MAX_BYTES)
    archive.close({"schema": bundle_file.SCHEMA})
    data = output.getvalue()
    archive.text("late.txt", "x")
    assert output.getvalue() == data
    assert bundle_file.unpack(data).files == {}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "has no|not an archive"),
        (b"usage: multusctl", "not an archive"),
        (packed(GOOD)[:-40], "not an archive"),
        (packed({}), "has no"),
        (packed({"top/index.json": GOOD["top/index.json"]}), "removed.json"),
        (packed({**GOOD, "top/index.json": b'{"schema": "multusctl.bundle/v9"}'}), "use that of the writer"),
        (packed({**GOOD, "top/index.json": b"[]"}), "not an archive"),
        (packed({**GOOD, "top/removed.json": b'{"removals": [1]}'}), "not an archive"),
        (packed({**GOOD, "top/../../x": b""}), "an unexpected entry"),
        (packed({**GOOD, "/etc/x": b"", "top//x": b""}), "an unexpected entry"),
        (packed({**GOOD, "top/.bashrc": b""}), "an unexpected entry"),
        (packed({"top/a": b""}, tarfile.SYMTYPE), "an unexpected entry"),
        (packed({"top/a": b""}, tarfile.CHRTYPE), "an unexpected entry"),
        (packed({**GOOD, "top/a": bytes(bundle_file.FILE_MAX_BYTES + 1)}), "an unexpected entry"),
        (packed({**GOOD, **{f"top/{number}": b"" for number in range(bundle_file.FILES_MAX)}}), "more than"),
        (gzip.compress(bytes(bundle_file.UNPACKED_MAX_BYTES + 1), 1), "unpacked"),
    ],
    # An archive has the time in it, and each worker of the tests makes its own.
    ids=lambda value: value if isinstance(value, str) else "data",
)
def test_what_no_daemon_of_ours_wrote_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BundleError, match=reason):
        bundle_file.unpack(data)
