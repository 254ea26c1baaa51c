"""Remove from an image's root directory the programs and libraries that a running daemon does not need.

    python3 image/slim.py ROOT

Of a base with Debian's packages: package manager, shells but one, perl, accounts, file systems, and the libraries that
only these need. Packages that are not in the base are passed over; those that are not named stay. What is left of the
list of packages says what is in the image, for the bill of materials and for scanners. The
script uses the standard library only.
"""

from __future__ import annotations

import re
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

UNNEEDED: Final = (
    # Programs. What is left: one shell, coreutils, grep, sed, tar (for `kubectl cp`), and the loader's.
    *("adduser", "apt", "bash", "bsdutils", "debconf", "debian-archive-keyring", "debianutils", "diffutils", "dpkg"),
    *("e2fsprogs", "findutils", "gpgv", "init-system-helpers", "login", "login.defs", "logsave", "mawk", "mount"),
    *("ncurses-bin", "openssl", "openssl-provider-legacy", "passwd", "perl-base", "sqv", "sysvinit-utils"),
    *("usr-is-merged", "util-linux", "util-linux-extra"),
    *("python3-distutils", "python3-lib2to3", "python3-pip-whl", "python3-setuptools-whl", "python3*-venv"),
    # Libraries that only these programs use.
    *("libapt-pkg*", "libaudit*", "libblkid1*", "libcap-ng0*", "libcap2*", "libdebconfclient0*", "libext2fs2*"),
    *("libgcrypt20*", "libgnutls30*", "libgpg-error0*", "libhogweed6*", "libidn2-0*", "liblastlog2*", "liblz4-1*"),
    *("libmd0*", "libmount1*", "libnettle8*", "libp11-kit0*", "libpam*", "libseccomp2*", "libsemanage*", "libsepol2*"),
    *("libsmartcols1*", "libss2*", "libsystemd0*", "libtasn1-6*", "libudev1*", "libunistring*", "libxxhash0*"),
)
"""Names of packages, or patterns: a release of Debian changes the end of a library's."""
LEFTOVERS: Final = (
    *("etc/apt", "etc/dpkg", "etc/pam.d", "etc/security", "usr/lib/apt", "usr/lib/dpkg", "var/lib/apt", "var/lib/pam"),
    # Python has its own character sets.
    *("usr/lib/*/gconv", "usr/lib/*/perl-base", "usr/share/perl*", "usr/share/debconf", "usr/share/bash-completion"),
    *("usr/share/keyrings", "var/lib/systemd"),
)
"""Files of maintainers' scripts, and parts of packages that stay."""
DPKG: Final = "var/lib/dpkg"


def main() -> None:
    """The command."""
    slim(Path(sys.argv[1]).resolve())


def slim(root: Path) -> None:
    """Remove the packages and the leftovers from the image at `root`."""
    status = root / DPKG / "status"
    paragraphs = [text for text in status.read_text().split("\n\n") if text.strip()] if status.is_file() else []
    kept = [text for text in paragraphs if not unneeded(_name(text))]
    stay = {path for text in kept for path in listed(root, text)}
    for text in paragraphs:
        if text not in kept:
            for path in sorted(listed(root, text) - stay, reverse=True):
                _remove(root, path)
    for pattern in LEFTOVERS:
        for found in root.glob(pattern):
            shutil.rmtree(found)
    if paragraphs:
        shutil.rmtree(root / DPKG)
        status.parent.mkdir()
        status.write_text("\n\n".join(kept) + "\n")
    # Alternatives of programs that are gone.
    for directory in ("etc/alternatives", "usr/bin", "usr/sbin"):
        for link in (root / directory).glob("*"):
            target = str(link.readlink()) if link.is_symlink() else ""
            if target and not _there(root, target if target.startswith("/") else f"/{directory}/{target}"):
                link.unlink()


def unneeded(package: str) -> bool:
    """Report whether the package is removed."""
    return any(fnmatch(package, pattern) for pattern in UNNEEDED)


def listed(root: Path, paragraph: str) -> set[str]:
    """Return the paths of the package of that paragraph of dpkg's list."""
    info = root / DPKG / "info"
    found = [path for path in info.glob(f"{_name(paragraph)}*.list") if path.stem.split(":")[0] == _name(paragraph)]
    return {line for path in found for line in path.read_text().splitlines() if line != "/."}


def _name(paragraph: str) -> str:
    found = re.search(r"^Package: (\S+)$", paragraph, re.MULTILINE)
    assert found, paragraph[:60]
    return found[1]


def _there(root: Path, path: str) -> bool:
    """Report whether the path exists in the image; links are followed within the image."""
    for _ in range(40):
        at = root / path.lstrip("/")
        if not at.is_symlink():
            return at.exists()
        target = str(at.readlink())
        path = target if target.startswith("/") else str(Path(path).parent / target)
    return False


def _remove(root: Path, path: str) -> None:
    """Remove a file, a link to a file, or an empty directory. A link to a directory is shared and stays."""
    at = root / path.lstrip("/")
    if not at.parent.resolve().is_relative_to(root):
        sys.exit(f"image/slim.py: {path} is outside of {root}")
    if at.is_dir() and at.is_symlink():
        return
    if at.is_symlink() or at.is_file():
        at.unlink()
    elif at.is_dir() and not any(at.iterdir()):
        at.rmdir()


if __name__ == "__main__":
    main()
