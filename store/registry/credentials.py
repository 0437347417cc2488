"""Find a registry's user and password: on standard input, in the environment, or in the files of
`docker login`. Never in an argument, which every user of the machine can read."""

from __future__ import annotations

import base64
import os
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from triolet.errors import ConfigError

USERNAME: Final = "TRIOLET_REGISTRY_USERNAME"
PASSWORD: Final = "TRIOLET_REGISTRY_PASSWORD"
MAX_PASSWORD_BYTES: Final = 16 << 10
"""Some clouds use tokens of several kilobytes as passwords."""
MAX_CONFIG_BYTES: Final = 1 << 20
"""Size of Docker's config.json, which has a line or two per registry."""
HELPER_S: Final = 30.0
"""Seconds for a Docker credential helper, which may ask a cloud for a new password."""


class Credentials(NamedTuple):
    """A user of a registry.

    Attributes:
      username: user name in the registry.
      password: never shown.
      source: where they were found, for errors.
    """

    username: str
    password: str
    source: str

    def __repr__(self) -> str:
        return f"Credentials({self.username!r}, from {self.source})"


class _Auth(msgspec.Struct, frozen=True):
    """Docker's entry for one registry in config.json."""

    auth: str = ""
    identitytoken: str = ""


class _DockerConfig(msgspec.Struct, frozen=True, rename="camel"):
    auths: dict[str, _Auth] = {}
    cred_helpers: dict[str, str] = {}
    creds_store: str = ""


class _Helped(msgspec.Struct, frozen=True, rename="pascal"):
    """The answer of a credential helper."""

    username: str
    secret: str


def credentials_for(host: str, username: str | None, stdin: bytes | None) -> Credentials | None:
    """Return the credentials for a registry; None for anonymous access.

    Args:
      host: host of the registry, with its port.
      username: given to the command; its password is on standard input.
      stdin: its content, if a user name was given.

    Raises:
      ConfigError: half of the credentials is missing, or Docker's file is broken.
    """
    if username is not None:
        password = (stdin or b"").strip(b"\r\n")
        if not password or len(password) > MAX_PASSWORD_BYTES:
            raise ConfigError(
                f"--username {username} is given and standard input holds no password of 1 to "
                f"{MAX_PASSWORD_BYTES} bytes; pipe it in, such as `<password.txt`"
            )
        try:
            return Credentials(username, password.decode(), "standard input")
        except UnicodeDecodeError:
            raise ConfigError("the password from standard input is not UTF-8 text") from None
    user, secret = os.environ.get(USERNAME, ""), os.environ.get(PASSWORD, "")
    if user or secret:
        if not (user and secret):
            missing = PASSWORD if user else USERNAME
            raise ConfigError(f"{missing} is not set, but its counterpart is; set both, or neither")
        return Credentials(user, secret, f"the environment variable {PASSWORD}")
    return _docker_credentials(host)


def _docker_credentials(host: str) -> Credentials | None:
    # A user without a home directory has no Docker logins: "~" stays as it is.
    path = Path(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")) / "config.json"
    remedy = f"correct {path}, or set {USERNAME} and {PASSWORD}"
    try:
        with path.open("rb") as file:
            config = msgspec.json.decode(file.read(MAX_CONFIG_BYTES), type=_DockerConfig)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The decoder's error names the position of the fault, not its content.
        raise ConfigError(f"{path} cannot be read: {error}; {remedy}") from None
    names = (host, f"https://{host}", f"http://{host}", f"https://{host}/v1/")
    found = next((config.auths[name] for name in names if name in config.auths), _Auth())
    helper = config.cred_helpers.get(host)
    if helper is None and found.auth:
        return _stored(found.auth, host, path)
    if helper or config.creds_store:
        return _helped(helper or config.creds_store, host, remedy)
    if found.identitytoken:
        raise ConfigError(
            f"{path} holds an identity token for {host}, which Triolet does not use; {remedy}"
        )
    return None


def _stored(auth: str, host: str, path: Path) -> Credentials:
    try:
        username, _, password = base64.b64decode(auth, validate=True).decode().partition(":")
    except ValueError:
        username = password = ""
    # Docker ends some passwords with zero bytes.
    password = password.rstrip("\0")
    if not username or not password:
        raise ConfigError(f"{path} holds a broken `auth` for {host}; log in again")
    return Credentials(username, password, str(path))


def _helped(helper: str, host: str, remedy: str) -> Credentials | None:
    """Ask one of Docker's credential helpers; None if it has no entry for this registry."""
    program = f"docker-credential-{helper.replace('/', '_')}"  # a name, and no path
    try:
        asked = subprocess.run(
            [program, "get"],
            input=host.encode(),
            capture_output=True,
            timeout=HELPER_S,
            check=True,
        )
        answer = msgspec.json.decode(asked.stdout, type=_Helped)
    except subprocess.CalledProcessError:
        return None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} cannot be asked: {error}; {remedy}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ConfigError(f"{program} did not answer with user and password; {remedy}") from None
    return Credentials(answer.username, answer.secret, program)
