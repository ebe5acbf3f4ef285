"""Completion of the command line in bash, zsh and fish, by argcomplete (extra: completion)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tiered_kv.errors import MissingExtraError

SHELLS: Final = ("bash", "zsh", "fish")
COMPLETING: Final = "_ARGCOMPLETE"
"""The environment variable with which argcomplete's shell code asks for words."""


class PrintCompletion(argparse.Action):
    """Prints the code that a shell needs for completion, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, choices=SHELLS, help=help, default=argparse.SUPPRESS)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,  # Any: as argparse has it
        option_string: str | None = None,
    ) -> None:
        try:
            from argcomplete.shell_integration import shellcode
        except ImportError:
            parser.exit(2, f"error: {MissingExtraError('completion', 'completion')}\n")
        # Without defaults: where no word fits, the shell must not offer files.
        print(shellcode([parser.prog], use_defaults=False, shell=str(values)))
        parser.exit()


def words_so_far() -> list[str]:
    """Return the words of the command line that the shell completes."""
    return os.environ.get("COMP_LINE", "").split()


def answer_shell(parser: argparse.ArgumentParser) -> None:
    """Print the words that fit, and exit. Without argcomplete there are none."""
    try:
        import argcomplete
        from argcomplete.completers import FilesCompleter, SuppressCompleter
    except ImportError:
        raise SystemExit(1) from None
    for action in _actions(parser):
        names = str(action.metavar)
        if "STACK" in names:
            action.completer = FilesCompleter(("yaml", "yml"))  # type: ignore[attr-defined]
        elif names == "FILE":
            action.completer = FilesCompleter()  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options=False, default_completer=SuppressCompleter())


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)
