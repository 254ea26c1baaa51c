"""Declare the commands of `multusctl` and `kubectl multus`, parse and run them; exit statuses and errors.

A command imports modules that load slowly (rich, `kernel`, the API client) only when it runs, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Final, NamedTuple

from multus_daemon import __version__

DONE: Final = 0
FAILED: Final = 1
"""The command failed, or found something wrong."""
NO_DAEMON: Final = 3
"""No daemon answers, or there is no such pod or namespace."""
_KINDS: Final = frozenset({"pod", "pods", "po", "network-attachment-definition", "net-attach-def"})
"""Kinds that may stand before a name, as in kubectl's `pod/NAME`."""
_EXAMPLES: Final = {"pod": "shop/cart-0", "network": "shop/storage", "files": "manifests/", "shell": "bash"}
"""Arguments in the example of a command's help, by their names."""
WATCH_SECONDS: Final = 3.0
"""Minimum seconds between two requests of `-w`."""
_UNSET: Final = argparse.SUPPRESS
"""For options with a default in DEFAULTS: argparse's own would overwrite an option that stands before the command."""

Answer = dict[str, Any]
"""The JSON object of a command."""
Option = tuple[tuple[str, ...], dict[str, Any]]
"""Arguments of `argparse.ArgumentParser.add_argument`."""


class CommandError(argparse.ArgumentTypeError):
    """The command failed; the message says why and what to do. While arguments are parsed, it is a usage error."""

    status: ClassVar[int] = FAILED


class NotThereError(CommandError):
    """There is no such pod or namespace."""

    status = NO_DAEMON


class Command(NamedTuple):
    """A command; `run` returns the exit status. Its name is `called`; if that is empty, the name of `run`."""

    help: str
    """The help text. It is not taken from a docstring, as the image has none (`-OO`)."""
    run: Callable[[argparse.Namespace], int]
    options: tuple[Option, ...] = ()
    one_of: tuple[Option, ...] = ()
    """Options of which exactly one is required."""
    commands: tuple[Command, ...] = ()
    """Subcommands; `arguments.verb` names the one that runs."""
    called: str = ""

    @property
    def name(self) -> str:
        """The word on the command line."""
        return self.called or self.run.__name__

    def add_to(self, groups: Any, common: Iterable[Option] = (), **changes: Any) -> None:
        """Add the command to `groups` of `add_subparsers`, with `common` options; `changes` replace their settings."""
        summary = self.help[0].lower() + self.help[1:].rstrip(".")
        parser = groups.add_parser(self.name, help=summary, description=self.help)
        if not self.commands:
            words = (_EXAMPLES.get(names[0], "") for names, _ in (*self.options, *self.one_of))
            parser.epilog = " ".join(filter(None, ("example:", parser.prog, *words)))
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
    """Declare an option or a positional argument. `words`: values that shell completion offers."""
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
    made = argparse.ArgumentParser(prog=prog, description=about, epilog=f"{prog} COMMAND --help has an example.")
    made.set_defaults(**DEFAULTS)
    made.add_argument("--version", action="version", version=(text := f"{prog}: version {__version__}"))

    def version(_: argparse.Namespace) -> int:
        sys.stdout.write(f"{text}\n")
        return DONE

    _add(made, common)
    groups = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (*commands, Command("Print the version.", version)):
        command.add_to(groups, common, default=_UNSET)
    if "_ARGCOMPLETE" in os.environ:
        # The shell asks for the next word: this prints the answer and ends the program.
        import argcomplete

        argcomplete.autocomplete(made)
    return made


def split_name(text: str, form: str) -> tuple[str, str]:
    """Split `[NAMESPACE/]NAME`, or `KIND/NAME`; the namespace may be empty.

    Raises CommandError, which names the expected `form`.
    """
    namespace, slash, name = text.rpartition("/")
    if namespace in _KINDS:
        return "", name
    if not name or "/" in namespace or (slash and not namespace):
        raise CommandError(f"{text!r} is not of the form {form}")
    return namespace, name


@contextlib.contextmanager
def explained(problem: str) -> Iterator[None]:
    """Turn an OSError of the block into a CommandError: `problem`, then the reason."""
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

    `show(answer)` prints it for people. For a command with the options LIST, `show` also takes a `Listing`, and `names`
    are the key of the answer's list and the keys of an item's name, of which the first one with a value is printed.
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
        import json

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
    from multus_tools.tables import Listing

    listing = Listing(wide=arguments.output == "wide", headers=not arguments.no_headers, watch=arguments.watch)
    return lambda answer: show(answer, listing)


def _line(item: Answer, keys: Iterable[str]) -> str:
    # A node's answer may contain control characters.
    return "".join(filter(str.isprintable, next(filter(None, map(item.get, keys))))) + "\n"


@contextlib.contextmanager
def output_file(name: str, *, force: bool) -> Iterator[IO[bytes]]:
    """Open a temporary file for the block, and rename it to `name` after that; a failing block leaves no file.

    Raises CommandError, also if the file exists, unless `force`, and for a terminal.
    """
    if name == "-":
        if sys.stdout.isatty():
            raise CommandError("an archive can't be printed on a terminal: redirect it, or name a file with --output")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(name)
    _refuse(path, force=force)
    import tempfile

    with explained(f"{path} can't be written"), contextlib.ExitStack() as stack:
        opened = tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name[:200]}.", delete=False)  # noqa: SIM115
        file = stack.enter_context(opened)
        # After the rename it does nothing.
        stack.callback(Path(file.name).unlink, missing_ok=True)
        yield file
        file.flush()
        os.fsync(file.fileno())
        _refuse(path, force=force)
        os.rename(file.name, path)


def _refuse(path: Path, *, force: bool) -> None:
    if not force and os.path.lexists(path):
        raise CommandError(f"{path} exists: name another file, or use --force")
