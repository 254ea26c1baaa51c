"""Commands of `multusctl` and `kubectl multus`: their declaration, exit statuses and errors.

A command imports what takes time to load (rich, the kernel, the API client) when it runs: `--help` and JSON do without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Final

from multus_daemon import __version__

DONE: Final = 0
FAILED: Final = 1
"""The command failed, or found something wrong."""
NO_DAEMON: Final = 3
"""No daemon answers, or there is no such pod or namespace."""
WATCH_SECONDS: Final = 3.0
"""Least pause of `-w` between two looks."""
_UNSET: Final = argparse.SUPPRESS
"""The default is one of DEFAULTS: a default of the command would overwrite what stands before the command."""

Answer = dict[str, Any]
"""The JSON object of a command."""
Option = tuple[tuple[str, ...], dict[str, Any]]
"""Arguments of `argparse.ArgumentParser.add_argument`."""


class CommandError(argparse.ArgumentTypeError):
    """The command can't be done; the message says why and what to do. Raised for an argument, it is a usage error."""

    status: ClassVar[int] = FAILED


class NotThereError(CommandError):
    """There is no such pod or namespace."""

    status = NO_DAEMON


@dataclass(slots=True)
class Command:
    """A command; `run` returns the exit status. Its name is that of `run` unless it is given."""

    help: str
    """Not a docstring: the image has none (`-OO`)."""
    run: Callable[[argparse.Namespace], int]
    options: tuple[Option, ...] = ()
    one_of: tuple[Option, ...] = ()
    """Exactly one of these is required."""
    commands: tuple[Command, ...] = ()
    """Subcommands; `arguments.verb` names the one that runs."""
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or self.run.__name__

    def add_to(self, groups: Any, common: Iterable[Option] = (), **changes: Any) -> None:
        """Add the command to `groups` of `add_subparsers`, with `common` options whose settings `changes` replace."""
        summary = self.help[0].lower() + self.help[1:].rstrip(".")
        parser = groups.add_parser(self.name, help=summary, description=self.help)
        _add(parser, common, **changes)
        _add(parser, self.options)
        if self.one_of:
            _add(parser.add_mutually_exclusive_group(required=True), self.one_of)
        if self.commands:
            verbs = parser.add_subparsers(dest="verb", required=True)
            for command in self.commands:
                command.add_to(verbs)
        parser.set_defaults(run=self.run)


def option(*names: str, **settings: Any) -> Option:
    """Declare an option or a positional argument. `words`: the shell offers them in place of a value."""
    return names, settings


def _output(*formats: str) -> Option:
    return option("-o", "--output", choices=formats, default=_UNSET, help="default: for people")


JSON: Final = option("--json", action="store_const", const="json", dest="output", default=_UNSET, help="as -o json")
ONE: Final = (_output("json", "yaml"),)
LIST: Final = (
    _output("json", "yaml", "wide", "name"),
    option("--no-headers", action="store_true", default=_UNSET, help="only rows"),
    option("-w", "--watch", action="store_true", default=_UNSET, help="then print rows that change, until ctrl-C"),
)
"""Options of a command that prints a table, with kubectl's meaning."""
BUNDLE_FILE: Final = (
    option(
        "--output", metavar="FILE", dest="file", default="", help="default: multus-bundle-TIME.tar.gz; `-`: print it"
    ),
    option("--force", action="store_true", help="replace the file"),
)
"""Options of a command that writes an archive."""
NAMESPACE: Final = option("-n", "--namespace", metavar="NAME", default=_UNSET, help="namespace of the pods")
ALL: Final = option("-A", "--all-namespaces", action="store_true", default=_UNSET, help="look in all namespaces")
DEFAULTS: Final = {"output": "", "no_headers": False, "watch": False, "namespace": "", "all_namespaces": False}


def _add(parser: Any, options: Iterable[Option], **changes: Any) -> None:
    for names, settings in options:
        settings = {**settings, **changes}
        words = settings.pop("words", None)
        action = parser.add_argument(*names, **settings)
        if words:
            # argcomplete looks for this attribute.
            action.completer = lambda words=words, **_: words


def parser(prog: str, about: str, commands: Iterable[Command], common: tuple[Option, ...]) -> argparse.ArgumentParser:
    """Return the parser of a command line. The `common` options may stand before the command and after it."""
    made = argparse.ArgumentParser(prog=prog, description=about)
    made.set_defaults(**DEFAULTS)
    made.add_argument("--version", action="version", version=f"{prog}: version {__version__}")
    _add(made, common)
    groups = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        command.add_to(groups, common, default=_UNSET)
    if "_ARGCOMPLETE" in os.environ:
        # The shell asks for the next word: this prints the answer and ends the program.
        import argcomplete

        argcomplete.autocomplete(made)
    return made


def split_name(text: str, form: str) -> tuple[str, str]:
    """Split `[NAMESPACE/]NAME`; the namespace may be empty. Raises CommandError, which names the expected `form`."""
    namespace, slash, name = text.rpartition("/")
    if not name or "/" in namespace or (slash and not namespace):
        raise CommandError(f"{text!r} is not of the form {form}")
    return namespace, name


@contextlib.contextmanager
def explained(problem: str) -> Iterator[None]:
    """Turn an OSError into a CommandError: `problem`, then the reason."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{problem}: {error.strerror or error}") from error


def finish(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> None:
    """Run a command to the end of the program; return if its exit status is 0."""
    arguments = parser.parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
    except CommandError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        status = error.status
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        # The reader has read enough; the interpreter must not flush standard output at its end.
        sys.stdout = None
        status = FAILED
    if status:
        sys.exit(status)


def present(
    arguments: argparse.Namespace, look: Callable[[], Answer], show: Callable[..., None], names: Sequence[str] = ()
) -> Answer:
    """Print the answer of `look` in the format of `-o`, and return it. With `-w` print changes until an interrupt.

    `show(answer)` prints it for people. For a command with the options LIST, `show` takes a `Listing` too, and `names`
    are the keys of its list and of an item's name; if that is empty, of another.
    """
    print_answer = _printer(arguments, show, names)
    before: Answer = {}
    while True:
        began = time.monotonic()
        answer = look()
        if answer != before:
            print_answer(answer)
            sys.stdout.flush()
        if not (arguments.watch and names):
            return answer
        before = answer
        # Many nodes take long to ask: let them rest as long.
        time.sleep(max(WATCH_SECONDS, time.monotonic() - began))


def _printer(arguments: argparse.Namespace, show: Any, names: Sequence[str]) -> Any:
    if arguments.output == "json":
        return lambda answer: sys.stdout.write(json.dumps(answer, indent=4) + "\n")
    if arguments.output == "yaml":
        import yaml

        # The pure Python dumper takes half a minute for the largest answers.
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        return lambda answer: yaml.dump(answer, sys.stdout, dumper, sort_keys=False, explicit_start=True)
    if not names:
        return show
    if arguments.output == "name":
        items, *keys = names
        return lambda answer: sys.stdout.writelines(dict.fromkeys(_line(item, keys) for item in answer[items]))
    from multus_tools.terminal import Listing

    listing = Listing(wide=arguments.output == "wide", headers=not arguments.no_headers, watch=arguments.watch)
    return lambda answer: show(answer, listing)


def _line(item: Answer, keys: Iterable[str]) -> str:
    # A node's answer may contain control characters.
    return "".join(filter(str.isprintable, next(filter(None, map(item.get, keys))))) + "\n"


@contextlib.contextmanager
def output_file(name: str, *, force: bool) -> Iterator[IO[bytes]]:
    """Open the file for the block, after which it is in its place; a failing block leaves nothing.

    Raises CommandError, also if the file exists, unless `force`, and for a terminal.
    """
    if name == "-":
        if sys.stdout.isatty():
            raise CommandError("an archive is not for a terminal: redirect it, or name a file with --output")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(name)
    _refuse(path, force=force)
    temporary = path.parent / f".{path.name[:200]}.{os.getpid()}-{os.urandom(6).hex()}"
    with explained(f"{path} can't be written"):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with explained(f"{path} can't be written"):
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _refuse(path, force=force)
            temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _refuse(path: Path, *, force: bool) -> None:
    if not force and os.path.lexists(path):
        raise CommandError(f"{path} exists: name another file, or say --force")
