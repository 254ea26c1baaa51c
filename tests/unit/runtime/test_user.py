"""Find the directory in which the user of a program keeps runtime files."""

from __future__ import annotations

from pathlib import Path

import pytest

from multus_daemon.runtime import user


@pytest.mark.parametrize(
    ("uid", "uid_map", "directory"),
    [
        (0, "0 0 4294967295", None),
        (1000, "0 0 4294967295", "/run/user/1000"),
        # Root of a user namespace that an ordinary user has made, and of one that root has made.
        (0, "0 1000 1", "/run/user/1000"),
        (0, "0 0 1", None),
        (5, "0 100000 3\n5 0 1", None),
        (0, None, None),
        (1000, None, "/run/user/1000"),
    ],
)
def test_the_directory_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, uid_map: str | None, directory: str | None
) -> None:
    path = tmp_path / "uid_map"
    if uid_map is not None:
        path.write_text(uid_map + "\n")
    monkeypatch.setattr("os.geteuid", lambda: uid)
    found = user.runtime_directory({"XDG_RUNTIME_DIR": "/run/user/1000"}, path)
    assert found == (directory and Path(directory))


@pytest.mark.parametrize("environ", [{}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "relative"}])
def test_there_may_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert user.runtime_directory(environ, tmp_path / "none") is None
