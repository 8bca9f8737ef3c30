"""The command line, ``loco-ext``. A user's error prints one line on stderr and exits with code 2."""

import io
import sys
from collections.abc import Sequence

INTERRUPTED, CLOSED_PIPE = 130, 141  # 128 plus the number of the signal, as in shells


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``, by default the process's arguments, and return the exit code."""
    try:
        # Imported here, so that an interrupt is caught from the start.
        from loco_ext import commands

        if isinstance(sys.stdout, io.TextIOWrapper):  # stderr escapes what its encoding lacks, stdout would raise
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return commands.run(argv)
        finally:
            if sys.stdout is not None:  # it is None if the process was started without one
                sys.stdout.flush()
    except KeyboardInterrupt:
        if argv is None:
            _ignore_interrupts()
        print("loco-ext: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed the pipe
        _drop_output()
        return CLOSED_PIPE
    except OSError as error:  # commands report errors of files themselves, so this one is of the output
        _drop_output()
        print(f"loco-ext: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _ignore_interrupts() -> None:
    """Ignore further interrupts, so that the process ends undisturbed however often Ctrl-C is pressed."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _drop_output() -> None:
    """Redirect stdout to the null device, as the interpreter's final flush would fail and report that."""
    import os

    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
