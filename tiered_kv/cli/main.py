"""The `tiered-kv` command: `docs/reference/command.md` describes it, `tiered_kv.cli` has its verbs.

`tiered_kv.__main__` calls `main` on the main thread. What must stay true: a verb's module is imported only for this
verb, and each end has an exit status of `Status`.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Sequence
from typing import NoReturn

from tiered_kv import __version__
from tiered_kv.cli.output import Status, print_json, print_text
from tiered_kv.config.secrets import scrub
from tiered_kv.errors import ConfigError, MissingExtraError, TieredKVError

_VERBS = {
    "check": "validate a stack's file, open every tier, show what each can do here",
    "serve": "serve a stack to all engines of this host, over a unix socket",
    "replay": "drive real bytes through a stack by a request trace, and check every block that comes back",
    "record": "record which blocks the requests of a running stack ask for, as a trace for simulate",
    "trace": "say what a trace of requests is and has, and convert it, also logs of vLLM and SGLang",
    "simulate": "say what policies, sizes and stacks would hit and cost, without moving a byte",
    "size": "say what a model's blocks take, what a load needs, and which stack fits",
    "bench": "measure store and load throughput and lookup latency, tier by tier",
    "inspect": "show what each tier stores, by namespace, and check whether its blocks are sound",
    "purge": "remove the bytes of a namespace, or of a tenant, from every tier of a stack",
    "copy": "copy stored blocks to another storage, as they are",
    "export": "write blocks of a storage into one file",
    "import": "put the blocks of such a file into a storage",
    "drain": "take a tier of a running stack out, for a disk that is replaced",
    "attach": "put a tier back that was taken out",
    "top": "show what a running stack does now, tier by tier",
    "limit": "show and change the shares of tenants in a running stack",
    "doctor": "say what a running engine gains, what limits that, and which setting to change",
    "why": "say why blocks of a running stack were misses",
    "plugins": "list the tier types that were found, or the settings of one",
    "schema": "print the JSON schema of a stack's file, for editors",
}

_MODULES = {"schema": "plugins", "import": "import_file", "attach": "drain"}
"""The module of each verb that no module is named after; a module cannot be named `import`."""
_EPILOG = """examples:
  tiered-kv VERB --help, or tiered-kv help VERB
      all options of a verb, with examples
  tiered-kv check stack.yaml
      is the file right, and does every tier open here?
  eval "$(register-python-argcomplete tiered-kv)"
      complete verbs, options and files with the TAB key (extra: completion)

exit status:
  0    all is well
  1    the verb did its work and found something wrong
  2    it could not be done, or wrong usage; standard error says why
  130  Ctrl-C"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; `argv` is by default the process's own."""
    given = sys.argv[1:] if argv is None else argv
    # A stream that was closed is None. Its output is dropped.
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()
    try:
        try:
            return _run(given)
        finally:  # runs also where argparse exits
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _failed("interrupted", given, Status.INTERRUPTED)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it again when it ends
        if not isinstance(error, BrokenPipeError):  # the reader of a broken pipe has ended, as `head` does
            print(f"error: {error}", file=sys.stderr)
        return Status.ERROR


def _run(given: Sequence[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for the words that complete a line
        try:
            import argcomplete
        except ImportError:
            return _failed(f"error: {MissingExtraError('completion', 'completion')}", given, Status.ERROR)
        argcomplete.autocomplete(_parser(os.environ["COMP_LINE"].split()))  # which exits
    if not given:  # this is wrong usage, so the help shows all verbs
        _parser(given).print_help(sys.stderr)
        return Status.ERROR
    if given[0] == "help":
        given = [*given[1:], "--help"]
    args, unknown = _parser(given).parse_known_args(given)
    if unknown:
        from tiered_kv.config.validation import suggestion

        known = re.findall(r"--[a-z-]+", args.parser.format_help())
        args.parser.error(f"unknown arguments: {' '.join(unknown)}{suggestion(unknown[0], known)}")
    try:
        status: int = args.run(args)
        return status
    except TieredKVError as error:
        if args.debug:
            traceback.print_exc()
        if isinstance(error, ConfigError) and getattr(args, "stack", None):
            from tiered_kv.config.reading import placed

            error = placed(error, args.stack)
        return _failed(f"error: {scrub(str(error), set())}", given, Status.ERROR)  # STACK may be a URL by mistake


def _failed(text: str, given: Sequence[str], status: Status) -> Status:
    """Print why the command ends: for people on standard error, and with `--json` as an object, too."""
    print_text(text, sys.stderr)
    if "--json" in given:
        print_json({"error": text.removeprefix("error: ")})
    return status


class _Parser(argparse.ArgumentParser):
    """A parser whose errors name the nearest verb, and are printed as a JSON object, too, with `--json`."""

    given: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        if word := re.search(r"argument VERB: invalid choice: '(.*?)'", message):
            from tiered_kv.config.validation import suggestion

            message = f"there is no verb '{word[1]}'{suggestion(word[1], [*_VERBS])}; verbs: {', '.join(_VERBS)}"
        if "--json" in self.given:
            print_json({"error": message})
        self.print_usage(sys.stderr)
        print_text(f"{self.prog}: error: {message}", sys.stderr)
        self.exit(Status.ERROR)


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    _Parser.given = given
    parser = _Parser(
        prog="tiered-kv",
        description="A tiered store for the key/value blocks of language-model servers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tiered-kv {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb, about in _VERBS.items():
        sub = verbs.add_parser(verb, help=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        sub.add_argument("--debug", action="store_true", help="show where an error comes from")
        # Only the given verb is imported: a verb must not need the libraries of other verbs.
        if verb in given:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # see `__main__`
            try:
                module = importlib.import_module(f"tiered_kv.cli.{_MODULES.get(verb, verb)}")
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            module.add_arguments(sub)
            width = shutil.get_terminal_size().columns - 2
            sub.description = "\n\n".join(textwrap.fill(part, width) for part in str(sub.description).split("\n\n"))
            sub.set_defaults(run=module.run, parser=sub, verb=verb, given=list(given))
    return parser
