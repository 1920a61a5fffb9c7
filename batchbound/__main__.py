"""Entry point of ``batchbound`` and ``python -m batchbound``."""

import signal
import sys


def command() -> int:
    """Run this process's command and return its exit status."""
    try:
        from .cli import main
    except KeyboardInterrupt:
        print("batchbound: interrupted", file=sys.stderr)
        return 130
    status = main()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # An interrupt while Python shuts down would print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Python remembers an interrupt in exec'd code (as in dataclasses) until other code is exec'd. Otherwise
    # the process would end by the signal instead of the status, although the interrupt was handled.
    exec("")
    return status


if __name__ == "__main__":
    sys.exit(command())
