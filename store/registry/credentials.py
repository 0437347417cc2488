"""Who asks a registry: user and password, from the command's standard input, the environment, or
what `docker login` has stored. Never from an argument: every user of a machine can read these."""

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
"""Some clouds' passwords are tokens of several kilobytes."""
MAX_CONFIG_BYTES: Final = 1 << 20
"""Of Docker's config.json, which has a line or two for each registry."""
HELPER_S: Final = 30.0
"""For a credential helper of Docker, which may ask a cloud for a new password."""
_HELPER_PREFIX: Final = "docker-credential-"


class Credentials(NamedTuple):
    """A user of a registry.

    Attributes:
      username: as the registry knows it.
      password: never shown.
      source: where they are from, for errors.
    """

    username: str
    password: str
    source: str

    def __repr__(self) -> str:
        return f"Credentials({self.username!r}, from {self.source})"


class _Auth(msgspec.Struct, frozen=True):
    """What Docker's config.json holds for one registry."""

    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""


class _DockerConfig(msgspec.Struct, frozen=True, rename="camel"):
    auths: dict[str, _Auth] = {}
    cred_helpers: dict[str, str] = {}
    creds_store: str = ""


class _Helped(msgspec.Struct, frozen=True, rename="pascal"):
    """What a credential helper answers."""

    username: str
    secret: str


def credentials_for(host: str, username: str | None, stdin: bytes | None) -> Credentials | None:
    """Return who asks a registry; None to ask as anybody.

    Args:
      host: of the registry, with its port.
      username: that a command was given; its password is on standard input.
      stdin: what came there, if a user name was given.

    Raises:
      ConfigError: there is half of what is needed, or Docker's file is broken.
    """
    if username is not None:
        password = (stdin or b"").strip(b"\r\n")
        if not password or len(password) > MAX_PASSWORD_BYTES:
            raise ConfigError(
                f"--username {username} is given and standard input holds no password of 1 to "
                f"{MAX_PASSWORD_BYTES} bytes; pipe it in, such as `<password.txt`"
            )
        return Credentials(username, _text(password, "standard input"), "standard input")
    user, secret = os.environ.get(USERNAME, ""), os.environ.get(PASSWORD, "")
    if user or secret:
        if not (user and secret):
            missing = PASSWORD if user else USERNAME
            raise ConfigError(f"{missing} is not set, and its pair is; set both, or none")
        return Credentials(user, secret, f"the environment variable {PASSWORD}")
    return _docker_credentials(host)


def _docker_credentials(host: str) -> Credentials | None:
    folder = os.environ.get("DOCKER_CONFIG", "")
    try:
        path = (Path(folder) if folder else Path.home() / ".docker") / "config.json"
    except RuntimeError:
        return None  # a user without a home directory has logged in nowhere
    try:
        with path.open("rb") as file:
            config = msgspec.json.decode(file.read(MAX_CONFIG_BYTES), type=_DockerConfig)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        # A decoder's error says where the fault is and not what stands there.
        raise ConfigError(
            f"{path} cannot be read: {error}; correct it, or set {USERNAME} and {PASSWORD}"
        ) from None
    helper = config.cred_helpers.get(host)
    names = (host, f"https://{host}", f"http://{host}", f"https://{host}/v1/")
    found = next((config.auths[name] for name in names if name in config.auths), None)
    if helper is None and found is not None and (found.auth or found.username):
        return _stored(found, host, path)
    helper = helper or config.creds_store
    if helper:
        return _helped(helper, host, path)
    if found is not None and found.identitytoken:
        raise ConfigError(
            f"{path} holds an identity token for {host}, which Triolet does not use; set "
            f"{USERNAME} and {PASSWORD}"
        )
    return None


def _stored(found: _Auth, host: str, path: Path) -> Credentials:
    if not found.auth:
        return Credentials(found.username, found.password, str(path))
    try:
        username, colon, password = base64.b64decode(found.auth, validate=True).partition(b":")
    except ValueError:
        username, colon, password = b"", b"", b""
    if not colon or not username:
        raise ConfigError(f"{path} holds a broken `auth` for {host}; log in again")
    # Docker ends some passwords with zero bytes.
    password = password.rstrip(b"\0")
    return Credentials(_text(username, str(path)), _text(password, str(path)), str(path))


def _helped(helper: str, host: str, path: Path) -> Credentials | None:
    """Ask one of Docker's credential helpers; None if it knows none for this registry."""
    program = f"{_HELPER_PREFIX}{helper}"
    remedy = f"correct {path}, or set {USERNAME} and {PASSWORD}"
    if "/" in helper:
        raise ConfigError(f"{path} names the credential helper {helper!r}, no program; {remedy}")
    try:
        asked = subprocess.run(
            [program, "get"],
            input=host.encode(),
            capture_output=True,
            timeout=HELPER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{program} has not answered within {HELPER_S:g} s; {remedy}") from None
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path} names {program}, which cannot run: {reason}; {remedy}") from None
    if asked.returncode:
        return None
    try:
        answer = msgspec.json.decode(asked.stdout, type=_Helped)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ConfigError(f"{program} answers what is no user and password; {remedy}") from None
    return Credentials(answer.username, answer.secret, program)


def _text(content: bytes, source: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"the password from {source} is no UTF-8 text") from None
