"""`OtherHosts`: opens connections to servers on other hosts, to proxy requests to the holder of an
answer."""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import trio

from triolet.errors import ConfigError, said_by

from .answer_directory import AnswerDirectory
from .host_secret import read_host_secret
from .peers import PeerAnswers

if TYPE_CHECKING:
    from triolet.config import ServerConfig

    from .peers import PeerAnswer, PeerStream

_PORTS: Final = {"http": 80, "https": 443}
_PROBES: Final = 3
"""Unanswered TCP keepalive probes, one per second, after which a host counts as gone."""


class OtherHosts:
    """The servers on other hosts.

    Args:
      config: this host's URL, and bounds.

    Attributes:
      secret: the secret that all hosts share.
      directory: records which host holds which answer.
      answers: responses from other hosts that are being proxied.

    Raises:
      ConfigError: a file cannot be used.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config.hosts
        self.secret = read_host_secret(config.hosts.secret_file)
        self.directory = AnswerDirectory(config)
        self.answers = PeerAnswers()
        try:
            self._tls = ssl.create_default_context(cafile=config.hosts.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"server.hosts.ca_file is {config.hosts.ca_file!r}, which cannot be used: "
                f"{said_by(error)}"
            ) from None

    async def connect(self, url: str, patience_s: float) -> PeerAnswer:
        """Open a connection to a host.

        Raises:
          OSError, trio.BrokenResourceError: it cannot be reached, or its URL is not allowed.
        """
        if not self._config.may_reach(url):
            raise OSError(f"server.hosts.allow_http does not allow {url}")
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        with trio.move_on_after(self._config.timeout_s):
            below = await trio.open_tcp_stream(host, port)
            stream: PeerStream = below
            try:
                self._watch(below)
                if parts.scheme == "https":
                    stream = trio.SSLStream(
                        below, self._tls, server_hostname=host, https_compatible=True
                    )
                    await stream.do_handshake()
            except BaseException:
                below.socket.close()
                raise
            return self.answers.add(stream, patience_s, parts.netloc)
        raise OSError(f"no connection within {self._config.timeout_s:g} s")

    def _watch(self, stream: trio.SocketStream) -> None:
        """Let the kernel close a connection whose host has vanished."""
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle_s = max(1, int(self._config.lease_s))
        values = {"TCP_KEEPIDLE": idle_s, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": _PROBES}
        for name in values.keys() & vars(socket):  # macOS has no TCP_KEEPIDLE
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), values[name])
