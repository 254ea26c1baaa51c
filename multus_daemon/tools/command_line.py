"""Commands of `multusctl` and `kubectl multus`: their declaration, exit statuses and errors.

A command imports what takes time to load (rich, the kernel, the API client) when it runs: `--help` and JSON do without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

DONE: Final = 0
FAILED: Final = 1
"""The command failed, or found something wrong."""
NO_DAEMON: Final = 3
"""No daemon answers."""

Answer = dict[str, Any]
"""The JSON object of a command."""
Option = tuple[tuple[str, ...], dict[str, Any]]
"""Arguments of `argparse.ArgumentParser.add_argument`."""


class CommandError(argparse.ArgumentTypeError):
    """The command can't be done; the message says why and what to do. Raised for an argument, it is a usage error."""


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
    _add(made, common)
    groups = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        # A default would overwrite the value that stands before the command.
        command.add_to(groups, common, default=argparse.SUPPRESS)
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


def print_json(answer: Mapping[str, Any]) -> None:
    """Print the answer on standard output."""
    sys.stdout.write(json.dumps(answer, indent=4) + "\n")
