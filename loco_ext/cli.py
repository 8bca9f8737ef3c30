"""The command line, ``loco-ext``. A user's error is one line on stderr and exit code 2."""

import sys
from collections.abc import Sequence

INTERRUPTED, CLOSED_PIPE = 130, 141  # 128 and the number of the signal, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in ``argv``, by default the process's arguments; returns the exit code."""
    try:
        # Imported here, so that an interrupt is caught from the first moment on.
        from loco_ext import commands

        try:
            return commands.run(argv)
        finally:
            if sys.stdout is not None:  # it is None where the process was started without one
                sys.stdout.flush()
    except KeyboardInterrupt:
        if argv is None:
            _ignore_interrupts()
        print("loco-ext: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever reads the output has gone
        _drop_output()
        return CLOSED_PIPE
    except OSError as error:  # those of files are told by name: this one is of the output
        _drop_output()
        print(f"loco-ext: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _ignore_interrupts() -> None:
    """Let the process end in peace, however often Ctrl-C is pressed."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _drop_output() -> None:
    """Send what is still to be written to stdout nowhere: the interpreter would report that it cannot be written."""
    import os

    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
