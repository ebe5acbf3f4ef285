"""The program `tiered-kv`, also as `python -m tiered_kv`. It runs the command on the main thread.

What must stay true: Ctrl-C ends it without a traceback.
"""

from __future__ import annotations

import _thread
import signal
import sys

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than the rest of this module
if TYPE_CHECKING:
    from types import TracebackType


def main() -> int:
    """Run the command as the whole program, and return its exit status."""
    sys.excepthook, sys.unraisablehook = _on_exception, _on_unraisable
    try:
        # Ctrl-C waits for the end of the import: in the middle of a class, Python and Rust turn it into other errors.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        from tiered_kv.cli.main import main as command

        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return command()
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the interpreter's end would print a traceback


def _on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


def _on_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Interrupt the main thread again after a Ctrl-C in a destructor: Python itself would only print that error."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _thread.interrupt_main()
    else:
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    sys.exit(main())
