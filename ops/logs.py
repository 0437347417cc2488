"""Configures logging: JSON lines on stderr, or readable lines on a terminal.

Long string values are truncated, JSON escapes control characters, and messages of libraries that
use `logging` or `warnings` get the same format. Callers must not log prompts.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Final, cast

import structlog

from triolet.errors import ConfigError, said_by

from .log_stream import LogStream

if TYPE_CHECKING:
    from types import TracebackType
    from typing import TextIO

    from structlog.typing import EventDict, Processor, WrappedLogger

MAX_VALUE_CHARACTERS: Final = 256
MAX_TRACEBACK_CHARACTERS: Final = 8192
LEVELS: Final = ("debug", "info", "warning", "error")


def default_level() -> str:
    """Return the default level: warning on a terminal, else info."""
    return "warning" if sys.stderr.isatty() else "info"


def configure_logs(level: str | None, process: str) -> None:
    """Send the logs of this process to stderr.

    Args:
      level: one of LEVELS; None for `default_level`.
      process: name of this process in each line.

    Raises:
      ConfigError: the level is unknown.
    """
    chosen = default_level() if level is None else level.lower()
    if chosen not in LEVELS:
        raise ConfigError(f"log level {level!r} is unknown; allowed: {', '.join(LEVELS)}")
    number = logging.getLevelNamesMapping()[chosen.upper()]

    def name_process(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event.setdefault("process", process)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_process,
    ]
    last: list[Processor] = (
        [cut_values, structlog.dev.ConsoleRenderer(pad_event_to=32)]
        if sys.stderr.isatty()
        else [
            structlog.processors.format_exc_info,
            cut_values,
            structlog.processors.JSONRenderer(default=repr),
        ]
    )
    out = never_waiting(sys.stderr)
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", out)),
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    # Drop info lines of libraries.
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_crash


def forget_logs() -> None:
    """Undo `configure_logs` and close its descriptor. For a fork that closes descriptors by number:
    the log stream would otherwise close a number that is in use again."""
    structlog.reset_defaults()
    for handler in tuple(logging.root.handlers):
        logging.root.removeHandler(handler)
        handler.close()
    logging.root.setLevel(logging.WARNING)
    logging.captureWarnings(False)
    sys.excepthook = sys.__excepthook__


def never_waiting(out: TextIO) -> LogStream | TextIO:
    """Return a stream that does not block on its reader, if `out` has a descriptor."""
    try:
        return LogStream(out)
    except OSError:  # no descriptor, for example under a test runner that captures output
        return out


def cut_values(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Convert bytes and errors to text and truncate long values. Tracebacks keep their end, which
    names the error."""
    for key, value in event.items():
        if isinstance(value, bytes):
            event[key] = value = value.decode("utf-8", "backslashreplace")
        elif isinstance(value, BaseException) and key != "exc_info":
            event[key] = value = said_by(value)
        if key == "exception":
            event[key] = str(value)[-MAX_TRACEBACK_CHARACTERS:]
        elif key == "exc_info" or value is None or isinstance(value, bool | int | float):
            continue
        else:
            text = value if isinstance(value, str) else repr(value)
            if len(text) > MAX_VALUE_CHARACTERS:
                event[key] = text[: MAX_VALUE_CHARACTERS - 1] + "…"
    return event


def _log_crash(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    structlog.get_logger().critical("crashed", exc_info=(kind, error, traceback))
