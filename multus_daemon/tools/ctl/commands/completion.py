"""`multusctl completion`: the shell's completion, made from the command line itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from multus_daemon.tools.ctl.commands import common

SHELLS = ("bash", "zsh", "fish")


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    meaning = "print what your shell needs to complete this command"
    parser = groups.add_parser("completion", help=meaning, description=f"{meaning.capitalize()}.")
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Raises nothing."""
    from multus_daemon.tools import ctl

    words = dict(_words(ctl.parser()))
    sys.stdout.write(_fish(words) if arguments.shell == "fish" else _bash(words, zsh=arguments.shell == "zsh"))
    return common.DONE


def _words(parser: argparse.ArgumentParser, before: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """For each command (empty: none yet) the words that may follow, with their help."""
    found: dict[str, str] = dict(parser.get_default("words") or {})
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                found[name] = helps.get(name, "")
                yield from _words(child, f"{before} {name}".strip())
        elif action.choices:
            found |= dict.fromkeys(map(str, action.choices), "")
        elif action.option_strings:
            found[action.option_strings[-1]] = action.help or ""
    yield before, found


def _bash(words: dict[str, dict[str, str]], *, zsh: bool) -> str:
    cases = "\n".join(
        f'        "{before}") words="{" ".join(sorted(found))}" ;;' for before, found in sorted(words.items())
    )
    head = "autoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return f"""{head}_multusctl() {{
    local before="" word words
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$word" in -*|*/*) ;; *) before="${{before:+$before }}$word" ;; esac
    done
    case "$before" in
{cases}
        *) words="" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _multusctl multusctl
"""


def _fish(words: dict[str, dict[str, str]]) -> str:
    lines = []
    for before, found in sorted(words.items()):
        path = before.split()
        needed = " && ".join(f"__fish_seen_subcommand_from {word}" for word in path)
        children = [name for name in found if not name.startswith("-")]
        absent = f"not __fish_seen_subcommand_from {' '.join(children)}" if children else ""
        condition = " && ".join(filter(None, (needed, absent)))
        for name, meaning in sorted(found.items()):
            word = f"-l {name[2:]}" if name.startswith("--") else f"-a {name} -f"
            text = meaning.replace("'", "\\'").replace("%(default)s", "").replace("()", "")
            lines.append(f"complete -c multusctl -n '{condition}' {word} -d '{text}'")
    return "\n".join(lines) + "\n"
