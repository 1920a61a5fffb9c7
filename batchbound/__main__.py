"""``batchbound``, and ``python -m batchbound``: a command in a process of its own, from begin to end."""

import signal
import sys


def command() -> int:
    """Return the exit status of the command that the words of this process name."""
    try:
        from .cli import main
    except KeyboardInterrupt:
        print("batchbound: interrupted", file=sys.stderr)
        return 130
    status = main()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # The work is over: an interrupt while Python tidies up would print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # An interrupt that came in a text that was run (a data class being made) is noted down until another text
    # is: Python would end the process by the signal and not by the status, although it was dealt with.
    exec("")
    return status


if __name__ == "__main__":
    sys.exit(command())
