"""`python -m loadtest.run`: run locust, headless, against a server that it starts and stops.

Writes report.html, streams.json and logs to build/loadtest/ and prints the streams' figures. Exit
code 0 if all streams succeeded, 1 if one failed or none was measured, 2 if nothing could run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from .figures import PERCENTILES, StreamRecord, failures, rows
from .harness.campaign import as_table, campaign_parser, run_campaign
from .harness.servers import running_server

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.console import Console

USER_CLASSES = {
    "sse": ["ChatOverSSE"],
    "ws": ["ChatOverWebSocket"],
    "both": ["ChatOverSSE", "ChatOverWebSocket"],
}
FINISH_S = 60
"""Time for running streams to finish at the end, so that they do not count as failed."""
MARGIN_S = 60
"""Additional time for locust itself."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = campaign_parser("run", "Load a Triolet server with SSE and WebSocket users.")
    parser.set_defaults(out=Path("build/loadtest"))
    parser.add_argument("--users", type=int, default=8, help="concurrent users (8)")
    parser.add_argument("--spawn-rate", type=float, default=8, help="new users per second (8)")
    parser.add_argument("--duration", type=int, default=20, help="seconds of load (20)")
    parser.add_argument("--protocol", choices=tuple(USER_CLASSES), default="both")
    parser.add_argument("--url", help="load this server instead of starting one")
    options = parser.parse_args(arguments)
    if options.url and options.serve:
        parser.error("--url starts no server, so server options have no effect")
    return options


def locust_command(options: argparse.Namespace, url: str) -> list[str]:
    """Return the command that runs locust."""
    out: Path = options.out
    return [
        *(sys.executable, "-m", "locust", "--headless", "--only-summary"),
        *("--locustfile", str(Path(__file__).with_name("locustfile.py"))),
        *("--host", url, "--users", str(options.users), "--spawn-rate", str(options.spawn_rate)),
        *("--run-time", f"{options.duration}s", "--stop-timeout", str(FINISH_S)),
        *("--html", str(out / "report.html"), "--streams-file", str(out / "streams.json")),
        *("--logfile", str(out / "locust.log")),
        *USER_CLASSES[options.protocol],
    ]


def load(options: argparse.Namespace, url: str) -> list[StreamRecord]:
    """Run locust and return the record of every stream.

    Raises:
      subprocess.TimeoutExpired: it did not finish and was killed.
    """
    streams: Path = options.out / "streams.json"
    streams.unlink(missing_ok=True)  # a file of an earlier run must not be used
    with (options.out / "locust.out").open("wb") as output:
        subprocess.run(
            locust_command(options, url),
            check=False,  # locust's exit code counts failures; we count them ourselves
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=options.duration + FINISH_S + MARGIN_S,
        )
    if not streams.exists():
        return []
    return [StreamRecord(**record) for record in json.loads(streams.read_text(encoding="utf-8"))]


def show(console: Console, records: Sequence[StreamRecord], out: Path) -> None:
    """Print the table of figures and the list of failures."""
    shown = [
        [row.name, row.unit, str(row.count), *(f"{value:.1f}" for value in row.percentiles)]
        for row in rows(records)
    ]
    columns = ("figure", "unit", "streams", *(f"p{p}" for p in PERCENTILES))
    console.print(as_table(f"{len(records)} streams", columns, shown, num_texts=2))
    failed = failures(records)
    console.print(
        f"failures: {failed.total()}", *(f"  {n} x {why}" for why, n in failed.items()), sep="\n"
    )
    console.print(f"report: {out / 'report.html'}", soft_wrap=True)


def campaign(options: argparse.Namespace, console: Console) -> list[str]:
    """Load a server, print the streams' figures and return what was wrong."""
    server = (
        nullcontext(options.url)
        if options.url
        else running_server(options.serve, options.out / "server.log")
    )
    try:
        with server as url:
            records = load(options, url)
    except subprocess.TimeoutExpired as error:
        return [f"locust did not finish within {error.timeout:.0f} s"]
    if not records:
        return [f"locust measured nothing; see {options.out / 'locust.log'}"]
    show(console, records, options.out)
    return [f"{times} x {why}" for why, times in failures(records).items()]


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    return run_campaign(parse(arguments), __doc__, campaign)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
