"""The entry point: one place where errors, signals and broken pipes become exit codes."""

from __future__ import annotations

import io
import os
import signal
import sys
from enum import IntEnum
from typing import Any, NoReturn

from mmctl import __version__


class Exit(IntEnum):
    """Exit codes of every command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    FINDING = 3
    NO_SOURCE = 4
    INTERRUPTED = 130
    TERMINATED = 143


def main(argv: list[str] | None = None) -> NoReturn:
    """Run ``argv`` (the process's own by default) and exit with the code it earned."""
    arguments = sys.argv[1:] if argv is None else argv
    _ready_streams()
    code: int = Exit.DONE
    try:
        if arguments == ["--version"]:
            print(f"mmctl {__version__}")
        elif "_MMCTL_COMPLETE" in os.environ:
            from mmctl.cli import app, completion

            completion.answer(app.root())
        else:
            signal.signal(signal.SIGTERM, _terminate)
            code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read us has gone: the rest has nowhere to go, and that is no failure.
        _discard_output()
        code = Exit.DONE
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    except OSError as error:
        if "--debug" in arguments:
            raise
        _discard_output()
        if code != Exit.FAILED:  # a command that failed on a full disk has said so
            _complain(f"cannot write the output: {error.strerror or error}")
        code = Exit.FAILED
    sys.exit(code)


def _ready_streams() -> None:
    """Streams that were closed before the start lead nowhere; a mark that the locale's
    encoding lacks is written as ``?`` and costs no table."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _discard_output() -> None:
    """What is still buffered goes nowhere, so that the end of the process does not try again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminate(*_: object) -> NoReturn:
    sys.exit(Exit.TERMINATED)


def _run(arguments: list[str]) -> int:
    from mmctl.cli.app import PipeClosed, root
    from mmctl.engine.errors import MmctlError, NoSourceError, UsageError

    debug = "--debug" in arguments
    _say_remarks()
    try:
        result: Any = root().main(arguments, prog_name="mmctl", standalone_mode=False)
        return int(result) if isinstance(result, int) else Exit.DONE
    except MmctlError as error:
        if debug:
            raise
        from mmctl.cli.kinds import hint

        _complain(hint(arguments, str(error)) or str(error))
        if isinstance(error, UsageError):
            return Exit.USAGE
        return Exit.NO_SOURCE if isinstance(error, NoSourceError) else Exit.FAILED
    except (BrokenPipeError, PipeClosed):
        raise BrokenPipeError from None
    except OSError as error:
        if debug:
            raise
        _complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return Exit.FAILED
    except Exception as error:
        if debug:
            raise
        message = getattr(error, "format_message", None)  # typer's own usage errors
        if message is None:
            _complain(f"unexpected {type(error).__name__}: {error}; --debug shows where")
            return Exit.FAILED
        _complain(message())
        return Exit.USAGE


def _say_remarks() -> None:
    """What the engine remarks on is a note to the person; other warnings stay Python's."""
    import warnings

    from mmctl.cli.app import note
    from mmctl.engine.errors import Remark

    others = warnings.showwarning

    def say(message: Any, category: Any, *rest: Any, **more: Any) -> None:
        if issubclass(category, Remark):
            note(str(message))
        else:
            others(message, category, *rest, **more)

    warnings.showwarning = say


def _complain(message: str) -> None:
    line = " ".join(message.split())
    print(f"mmctl: error: {line}", file=sys.stderr)
