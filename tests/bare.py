"""Run commands in a fresh clone on a bare machine: Debian's smallest root file system, python3-venv, make and git.

    python -m tests.bare [--root] [COMMAND ...]

Each COMMAND is a line of the shell, run in the clone as an ordinary user, or as root; README's two by default. The
clone has what is committed. Needs root and debootstrap. The root file system is made once, and kept beside what
`build_tools` builds; commands run in a copy, with its own mounts and processes, which is removed at the end. Exit
status: that of the first command that fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests import debian
from tests.e2e.build_tools import cache_root
from tests.programs import missing

_SOURCES: Final = Path(__file__).resolve().parents[1]
_PACKAGES: Final = ("python3-venv", "make", "git")
_USER: Final = "newcomer"
_COMMANDS: Final = ("make demo", "make test")
_ENVIRONMENT: Final = re.compile(r"(?i)(https?|all|no)_proxy|CI|PIP_.*_URL|HYPOTHESIS_PROFILE")
"""Variables that go into the root: how the network is reached, and what CI sets."""
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENTER: Final = """\
set -e
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs -o mode=755 tmpfs run
# A chroot may not make user namespaces.
pivot_root . mnt
umount -l /mnt
cd "$2"
shift 2
# NB: not exec: the shell waits for the orphans of its process namespace.
"$@" && status=0 || status=$?
exit $status
"""
_SKIPPED: Final = re.compile(r"^SKIPPED \[(\d+)\] (\S+ .*)$")


def kept_root() -> Path:
    """Return the directory of the root file system, after making it if it is not there. Raises DebianError."""
    digest = hashlib.sha256(" ".join((debian.SUITE, *_PACKAGES, _USER)).encode()).hexdigest()[:12]
    kept = cache_root().with_name("roots") / digest
    if kept.exists():
        return kept
    _say(f"making the root file system {kept}: it is kept")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".root-", dir=kept.parent) as scratch:
        made = Path(scratch, "root")
        debian.bootstrap(made, _PACKAGES)
        subprocess.run(["/usr/sbin/chroot", made, "useradd", "--create-home", _USER], check=True, timeout=60)
        made.rename(kept)
    return kept


@contextlib.contextmanager
def fresh_root() -> Iterator[Path]:
    """A copy of the root file system with a clone of the sources, for the duration of a block. Raises DebianError."""
    kept = kept_root()
    scratch = Path(tempfile.mkdtemp(prefix="multus-bare-"))
    try:
        scratch.chmod(0o755)
        root = scratch / "root"
        subprocess.run(["cp", "--archive", "--reflink=auto", kept, root], check=True, timeout=600)
        _connect(root)
        # The sources may be another user's.
        trusting = scratch / "gitconfig"
        trusting.write_text("[safe]\n\tdirectory = *\n")
        clone = root / "home" / _USER / "multus-daemon"
        command = ["/usr/bin/git", "clone", "--quiet", "--no-hardlinks", str(_SOURCES), str(clone)]
        subprocess.run(command, env=os.environ | {"GIT_CONFIG_GLOBAL": str(trusting)}, check=True, timeout=300)
        yield root
    finally:
        # The mounts have gone with their namespace; none of another one is entered.
        subprocess.run(["rm", "-rf", "--one-file-system", str(scratch)], check=False, timeout=600)


def _connect(root: Path) -> None:
    """Let programs in the root reach the network, and pip its index, as on this machine."""
    for name in ("resolv.conf", "hosts"):
        if Path("/etc", name).exists():
            shutil.copyfile(Path("/etc", name), root / "etc" / name)
    settings = debian.pip_settings()
    if "cert" in settings:
        shutil.copyfile(settings["cert"], root / "etc" / "pip-ca.pem")
        settings["cert"] = "/etc/pip-ca.pem"
    (root / "etc" / "pip.conf").write_text(debian.pip_conf(settings))


def run(root: Path, command: str, *, as_root: bool) -> int:
    """Run a line of the shell in the clone and show its output; its exit status."""
    home = "/root" if as_root else f"/home/{_USER}"
    clone = f"/home/{_USER}/multus-daemon"
    environment = {name: value for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name)}
    environment |= {"PATH": _PATH, "HOME": home, "USER": "root" if as_root else _USER}
    drop = [] if as_root else ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--init-groups"]
    namespaces = ["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
    inner = [*drop, "sh", "-c", command]
    whole = ["/usr/bin/unshare", *namespaces, "sh", "-c", _ENTER, "sh", str(root), clone, *inner]
    _say(f"{'root' if as_root else _USER}: {command}")
    begun, skipped = time.monotonic(), Counter[str]()
    # A terminal of its own would be the tests' terminal.
    with subprocess.Popen(
        whole, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                if found := _SKIPPED.match(line):
                    skipped[found[2].partition(": ")[2]] += int(found[1])
        finally:
            # Every process in the root ends with it; it has ended by itself unless this program is interrupted.
            child.kill()
    for reason, number in skipped.most_common():
        _say(f"{number} skipped: {reason}")
    _say(f"{command}: {time.monotonic() - begun:.0f} s, exit status {child.returncode}")
    return child.returncode


def _say(text: str) -> None:
    print(f"bare: {text}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the commands; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bare", description="Run commands in a bare root.")
    parser.add_argument("--root", action="store_true", help="run them as root, not as an ordinary user")
    parser.add_argument("command", nargs="*", default=_COMMANDS, help="a line of the shell, run in a fresh clone")
    options = parser.parse_args(arguments)
    if os.geteuid() != 0:
        _say("needs root, for debootstrap and mounts")
        return 1
    if reason := missing("debootstrap", "git", "unshare"):
        _say(reason)
        return 1
    with fresh_root() as root:
        owner = "root:root" if options.root else f"{_USER}:{_USER}"
        clone = f"/home/{_USER}/multus-daemon"
        subprocess.run(["/usr/sbin/chroot", str(root), "chown", "-R", owner, clone], check=True, timeout=60)
        for command in options.command:
            if status := run(root, command, as_root=options.root):
                return status
    return 0


if __name__ == "__main__":
    # As Ctrl-C does: the root is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main(sys.argv[1:]))
    except debian.DebianError as error:
        sys.exit(f"bare: {error}")
