"""`tiered-kv serve`: one cache for all engines of a host.

`main` calls `run` on the main thread, which becomes the server's thread, and runs the handlers of signals. Another
thread ends the process at SIGTERM if a tier hangs while it opens. What must stay true: this process removes the socket
that it has made, at each end.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import pwd
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Final

from tiered_kv.cli.arguments import describe_use, file_path, positive_int, size
from tiered_kv.cli.output import Status, print_json, print_text
from tiered_kv.errors import ConfigError
from tiered_kv.server.descriptors import raise_limit
from tiered_kv.server.listener import Listener, listen
from tiered_kv.server.namespaces import Namespaces
from tiered_kv.server.server import CacheServer
from tiered_kv.server.users import Users
from tiered_kv.system.threads import start_thread

_COLLECT_AFTER: Final = 50_000
"""New objects after which Python looks for garbage, for up to 2 ms. A request makes 700, which is the default."""
_SWITCH_S: Final = 0.0001
"""How long a tier's thread may keep the interpreter from the server's thread: Python's default is 5 ms."""
_HANDLER_S: Final = 0.5
"""How long the handler of a signal may take to begin."""
_FIRST_PASSED_FD: Final = 3
"""systemd's first socket (sd_listen_fds(3))."""

_log = logging.getLogger("tiered_kv.server")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve a stack to all engines of this host. They map its memory, copy blocks to and from it, and find what any "
        "of them has stored. An engine attaches with 'attach: unix:PATH' in place of its stack.\n\n"
        "A file without 'namespace' and 'block' takes those of the engines."
    )
    parser.add_argument("stack", metavar="STACK", help="the stack's YAML file")
    is_passed = "LISTEN_FDS" in os.environ
    parser.add_argument(
        "--socket",
        metavar="PATH",
        type=file_path,
        required=not is_passed,
        help="where engines connect; systemd may pass it",
    )
    parser.add_argument(
        "--namespaces", metavar="N", type=positive_int, default=1, help="how many models divide the capacities (1)"
    )
    parser.add_argument(
        "--allow-user", metavar="USER", type=_user, action="append", default=[], help="who may connect, besides oneself"
    )
    parser.add_argument(
        "--warm-from",
        metavar="ADDRESS-OR-STACK",
        help="whose hottest blocks fill memory, behind the start: HOST:PORT of a running stack's metrics, a saved "
        "list, or a stack's file with 'warm' (the list that this server saved at its last end)",
    )
    parser.add_argument(
        "--warm-rate", metavar="BYTES/s", type=_rate, help="how fast at most; 0 for not at all (256MiB/s, 500 blocks/s)"
    )
    describe_use(
        parser,
        ("tiered-kv serve stack.yaml --socket /run/tiered-kv/cache.sock", "until Ctrl-C, or SIGTERM"),
        (
            "tiered-kv serve stack.yaml --socket /run/tiered-kv/cache.sock --namespaces 2 --allow-user 1000",
            "for two models, and for engines of another user",
        ),
    )


def run(args: argparse.Namespace) -> Status:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    raise_limit()
    Users(args.allow_user)  # an unknown user must fail before the socket exists
    listener = _passed_listener() or _listener(args.socket, is_shared=bool(args.allow_user))
    where = str(listener.getsockname())
    why = "it was stopped"
    given = {"source": args.warm_from, "rate": args.warm_rate}
    warm = {name: value for name, value in given.items() if value is not None}

    def remove() -> None:
        if isinstance(listener, Listener):  # a socket of systemd stays, and starts a server for the next engine
            listener.remove()

    def end(number: int, _: object) -> None:
        """End the process as without a handler: the stack is still being opened, and no engine uses it."""
        remove()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        os._exit(128 + number)  # the first process of a container survives the signal

    def stop(number: int, _: object) -> None:
        nonlocal why
        why = signal.Signals(number).name
        server.stop()

    with ExitStack() as undo:
        undo.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, end))
        undo.callback(listener.close)
        try:
            with _ending_in_time(remove):
                namespaces = Namespaces(args.stack, args.namespaces, warm)
                namespaces.socket_path = Path(where)
                version, process = version_of("tiered-kv"), os.getpid()
                _log.info("tiered-kv %s, process %d: %s with %s", version, process, args.stack, namespaces.tiers)
                pages = namespaces.open_pages()
                if pages is not None:
                    undo.callback(pages.close)
                namespaces.open_own()
            server = CacheServer(listener, namespaces, args.allow_user)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, stop)
            _log.info("engines can attach at unix:%s", where)
            if args.json:
                print_json({"socket": where, "pid": os.getpid()})
            else:
                print_text(f"serving {args.stack} at {where}")
            sys.stdout.flush()
            _notify("READY=1")
            _answer_first()
            server.serve()
        except BaseException as error:
            why = "an interrupt" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}"
            raise
        finally:
            _notify("STOPPING=1")
            remove()
            _log.info("tiered-kv has ended: %s", why)
    return Status.OK


@contextmanager
def _ending_in_time(remove: Callable[[], None]) -> Iterator[None]:
    """End the process at SIGTERM even if a tier's call keeps the main thread from running the signal's handler."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while signals := reader.recv(64):
            if signal.SIGTERM in signals:
                time.sleep(_HANDLER_S)  # the handler ends the process first, if it runs
                remove()
                os._exit(128 + signal.SIGTERM)

    thread = start_thread(watch, "tiered-kv-signals")
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()
        reader.close()


def _answer_first() -> None:
    """Let the server's thread answer first: collections of garbage and the threads of tiers may wait."""
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])
    sys.setswitchinterval(_SWITCH_S)


def _passed_listener() -> socket.socket | None:
    """Return the socket that systemd has passed to this process; None if it has passed none."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    passed = socket.socket(fileno=_FIRST_PASSED_FD)
    if passed.family is not socket.AF_UNIX or passed.type is not socket.SOCK_SEQPACKET:
        raise ConfigError("expected a unix socket of packets; write ListenSequentialPacket= in the socket unit")
    return passed


def _listener(path: Path | None, *, is_shared: bool) -> socket.socket:
    if path is None:
        raise ConfigError("expected the path of the socket", location="--socket")
    if path.exists() and not path.is_socket():
        raise ConfigError(f"cannot listen at {path}: it is no socket; give another path", location="--socket")
    return listen(path, mode=0o666 if is_shared else 0o600)


def _notify(state: str) -> None:
    """Report a state to systemd (sd_notify(3)), if systemd has started this process."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), address.replace("@", "\0", 1))


def _rate(text: str) -> int:
    return 0 if text == "0" else size(text)


def _user(text: str) -> int:
    try:
        return int(text) if text.isdecimal() else pwd.getpwnam(text).pw_uid
    except KeyError:
        raise argparse.ArgumentTypeError(f"there is no user {text!r}") from None
