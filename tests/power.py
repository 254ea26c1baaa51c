"""A disk that loses what was not fsynced: what a program did to it, and what a power failure may leave of that.

The model assumes no more than this of a file system:

- fsync of a file keeps its content, under the name that it has then or a later one.
- fsync of a directory keeps the names in it.
- Each other change of a name is there after the failure, or is not, whatever became of the others.
- What was written to a file since its last fsync may be missing, cut, or other bytes; what was synced stays before it.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")
Files = Mapping[str, bytes]
"""The files of a directory and those below it, by their path in it."""

CREATE: Final = "create"
WRITE: Final = "write"
FSYNC: Final = "fsync"
FSYNC_DIRECTORY: Final = "fsync of a directory"
RENAME: Final = "rename"
UNLINK: Final = "unlink"
ELSEWHERE: Final = "elsewhere"
"""A change that is not of this disk."""

_PATCHED: Final = ("open", "close", "write", "fsync", "rename", "unlink", "link", "ftruncate")


@dataclass(frozen=True)
class Operation:
    """One change; paths are relative to the disk's directory."""

    kind: str
    path: str = ""
    to: str = ""
    file: int = 0
    """A number of the file's own, whatever its name."""
    offset: int = 0
    data: bytes = b""


def content(root: Path) -> dict[str, bytes]:
    """The files below `root`."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def put(root: Path, files: Files) -> None:
    """Make `files` the content of `root`; directories stay."""
    for name in content(root):
        (root / name).unlink()
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o600)


class Recorder:
    """Notes what this process does to the files below `root` with the functions of `os`, within the `with` block.

    What goes another way (`open`, another process) is not seen: compare `Disk.whole` with the directory afterwards.
    """

    def __init__(self, root: Path, *, elsewhere: Sequence[Path] = (), syncs: bool = True) -> None:
        """`elsewhere`: directories whose changes are operations too, but of another disk.

        Without `syncs` no fsync is noted, as if it did nothing.
        """
        self._root = f"{root}/"
        self._elsewhere = tuple(f"{path}/" for path in elsewhere)
        self._syncs = syncs
        self._numbers = itertools.count(1)
        self._descriptors: dict[int, tuple[int, str]] = {}
        self._real: dict[str, Callable[..., Any]] = {}
        self.settle()

    def settle(self) -> None:
        """Everything so far is safe, as after sync(2). No file is open for writing."""
        assert not self._descriptors
        self.initial: Files = content(Path(self._root))
        self.operations: list[Operation] = []
        self._files = _numbered(self.initial)

    def note(self, operation: Operation) -> None:
        """An operation has been done."""
        self.operations.append(operation)

    def act(self, operation: Operation, do: Callable[[Operation], T]) -> T:
        """Do the operation and note it."""
        result = do(operation)
        self.note(operation)
        return result

    def disk(self, upto: int | None = None) -> Disk:
        """The disk after the first `upto` operations, by default all."""
        return Disk(self.initial, self.operations[:upto])

    def __enter__(self) -> Recorder:
        self._real = {name: getattr(os, name) for name in _PATCHED}
        for name in _PATCHED:
            setattr(os, name, getattr(self, f"_{name}"))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._real.items():
            setattr(os, name, function)

    def _place(self, path: Any, dir_fd: int | None = None) -> tuple[str | None, bool]:
        """The path below `root`, None for one that is not; whether it is in a directory of `elsewhere`."""
        if not isinstance(path, str | os.PathLike):
            return None, False
        text = str(os.fspath(path))
        if dir_fd is not None:
            text = f"{os.readlink(f'/proc/self/fd/{dir_fd}')}/{text}"
        is_here = f"{text}/".startswith(self._root)
        return (text[len(self._root) :] if is_here else None), text.startswith(self._elsewhere)

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        place, is_elsewhere = self._place(path, dir_fd)

        def do(_: Operation) -> int:
            descriptor: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
            return descriptor

        if place is None:
            is_change = is_elsewhere and flags & os.O_CREAT and flags & os.O_ACCMODE
            return self.act(Operation(ELSEWHERE), do) if is_change else do(Operation(ELSEWHERE))
        if flags & os.O_CREAT and place not in self._files:
            number = next(self._numbers)
            descriptor = self.act(Operation(CREATE, place, file=number), do)
            self._files[place] = number
        else:
            assert not flags & os.O_TRUNC, "not modelled"
            descriptor = do(Operation(ELSEWHERE))
        self._descriptors[descriptor] = (self._files.get(place, 0), place)
        return descriptor

    def _close(self, descriptor: int) -> None:
        self._descriptors.pop(descriptor, None)
        self._real["close"](descriptor)

    def _write(self, descriptor: int, data: Any) -> int:
        number, _ = self._descriptors.get(descriptor, (0, ""))

        def do(operation: Operation) -> int:
            written: int = self._real["write"](descriptor, operation.data)
            assert written == len(operation.data), "not modelled"
            return written

        if not number:
            return int(self._real["write"](descriptor, data))
        # The files concerned are written from their start, or appended to.
        return self.act(Operation(WRITE, file=number, offset=os.fstat(descriptor).st_size, data=bytes(data)), do)

    def _ftruncate(self, descriptor: int, size: int) -> None:
        assert descriptor not in self._descriptors, "not modelled"
        self._real["ftruncate"](descriptor, size)

    def _fsync(self, descriptor: Any) -> None:
        number, place = self._descriptors.get(descriptor, (0, None))
        if place is None or not self._syncs:
            self._real["fsync"](descriptor)
        elif stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self.act(Operation(FSYNC_DIRECTORY, place), lambda _: self._real["fsync"](descriptor))
        else:
            self.act(Operation(FSYNC, file=number), lambda _: self._real["fsync"](descriptor))

    def _rename(self, source: Any, target: Any, **more: Any) -> None:
        place, _ = self._place(source)
        to, _ = self._place(target)
        if place is None:
            self._real["rename"](source, target, **more)
            return
        assert to is not None, "not modelled"
        operation = Operation(RENAME, place, to, file=self._files[place])
        self.act(operation, lambda _: self._real["rename"](source, target, **more))
        self._files[to] = self._files.pop(place)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        place, is_elsewhere = self._place(path, dir_fd)

        def do(_: Operation) -> None:
            self._real["unlink"](path, dir_fd=dir_fd)

        if place in self._files:
            self.act(Operation(UNLINK, place, file=self._files[place]), do)
            del self._files[place]
        elif is_elsewhere:
            self.act(Operation(ELSEWHERE), do)
        else:
            do(Operation(ELSEWHERE))

    def _link(self, source: Any, target: Any, **more: Any) -> None:
        place, is_elsewhere = self._place(target, more.get("dst_dir_fd"))
        assert place is None, "not modelled"
        if is_elsewhere:
            self.act(Operation(ELSEWHERE), lambda _: self._real["link"](source, target, **more))
        else:
            self._real["link"](source, target, **more)


@dataclass
class _File:
    synced: bytes = b""
    versions: list[bytes] = field(default_factory=lambda: [b""])
    """Contents since the last fsync, the present one last."""

    def candidates(self, *, few: bool = False) -> list[bytes]:
        """Return the possible contents after a power failure; the synced one first, the present one last.

        With `few`, return only the synced content, half of the rest, and all of it.
        """
        found = [self.synced]
        for version in self.versions:
            tail = version[len(self.synced) :]
            half = len(tail) // 2
            cuts = [tail[:1], tail[:half], tail[:-1], bytes(half) + tail[half:]]
            # The length was on the disk before the data: zeros, or what was in the block before.
            lefts = (tail[:half], tail) if few else (*cuts, bytes(len(tail)), b"\xff" * len(tail), tail)
            found += [self.synced + left for left in lefts]
        return list(dict.fromkeys(found))


class Disk:
    """The state of a disk after some operations."""

    def __init__(self, initial: Files, operations: Sequence[Operation]) -> None:
        """`initial`: what was on it, and safe."""
        self._safe = _numbered(initial)
        self._files = {number: _File(initial[path], [initial[path]]) for path, number in self._safe.items()}
        self._unsafe: list[Operation] = []
        """The changes of names that may be lost."""
        for operation in operations:
            self._apply(operation)

    def _apply(self, operation: Operation) -> None:
        match operation.kind:
            case "create":
                self._files[operation.file] = _File()
                self._unsafe.append(operation)
            case "write":
                file = self._files[operation.file]
                file.versions.append(file.versions[-1][: operation.offset] + operation.data)
            case "fsync":
                file = self._files[operation.file]
                file.synced = file.versions[-1]
                file.versions = [file.synced]
                self._settle(lambda change: change.file == operation.file)
            case "fsync of a directory":
                self._settle(lambda change: os.path.dirname(change.path) == operation.path)
            case "rename" | "unlink":
                self._unsafe.append(operation)
            case _:
                assert operation.kind == ELSEWHERE

    def _settle(self, concerns: Callable[[Operation], bool]) -> None:
        self._safe = _named(self._safe, [change for change in self._unsafe if concerns(change)])
        self._unsafe = [change for change in self._unsafe if not concerns(change)]

    def whole(self) -> Files:
        """Return all files if nothing is lost: the state that the next process sees after kill -9."""
        names = _named(self._safe, self._unsafe)
        return {path: self._files[number].versions[-1] for path, number in sorted(names.items())}

    def least(self) -> Files:
        """Return the files if everything unsynced is lost."""
        return {path: self._files[number].synced for path, number in sorted(self._safe.items())}

    def torn(self) -> Files:
        """Every name is there, and half of what was written but not synced."""
        names = _named(self._safe, self._unsafe)
        found = {}
        for path, number in sorted(names.items()):
            file = self._files[number]
            tail = file.versions[-1][len(file.synced) :]
            found[path] = file.synced + tail[: len(tail) // 2]
        return found

    def outcomes(self, few: Callable[[str], bool] = lambda path: False) -> Iterator[Files]:
        """Everything that a power failure may leave, each once; of the files that `few` names some contents only."""
        seen = set()
        for kept in itertools.product((False, True), repeat=len(self._unsafe)):
            names = sorted(_named(self._safe, itertools.compress(self._unsafe, kept)).items())
            for contents in itertools.product(
                *(self._files[number].candidates(few=few(path)) for path, number in names)
            ):
                files = {path: data for (path, _), data in zip(names, contents, strict=True)}
                if (key := tuple(files.items())) not in seen:
                    seen.add(key)
                    yield files


def _numbered(initial: Files) -> dict[str, int]:
    """Numbers for the files that are there at the beginning; those that are made later have others."""
    return {path: -number for number, path in enumerate(initial, 1)}


def _named(names: Mapping[str, int], changes: Iterator[Operation] | Sequence[Operation]) -> dict[str, int]:
    """The numbers of files by name, after `changes`."""
    found = dict(names)
    for change in changes:
        if change.kind == RENAME:
            # The name before may have been lost already.
            if found.get(change.path) == change.file:
                del found[change.path]
            found[change.to] = change.file
        elif change.kind == CREATE:
            found[change.path] = change.file
        elif found.get(change.path) == change.file:
            del found[change.path]
    return found
