"""Install packages into the running Python's environment: `tools/install.py PIP-ARGUMENTS`.

Uses uv if possible: it unpacks packages once and links them, on all cores, while pip takes a minute
of one core. uv does not read pip's settings, so they are translated. pip is used if a setting has
no translation here, or if uv is unavailable or fails. Both show progress: bars on a terminal, plain
lines elsewhere.
"""

import ast
import os
import subprocess
import sys
import time

UV = "uv>=0.9,<1"

# pip's settings as uv's environment variables, with the separator of lists.
TRANSLATIONS = {
    "index-url": ("UV_DEFAULT_INDEX", ""),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "cert": ("SSL_CERT_FILE", ""),
    "proxy": ("ALL_PROXY", ""),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
UV_PIP = [sys.executable, "-m", "uv", "pip"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# Settings that do not change what is installed. pip's timeout may be a fraction, which uv refuses.
WITHOUT_MEANING = {
    "default-timeout",
    "disable-pip-version-check",
    "no-color",
    "no-input",
    "progress-bar",
    "quiet",
    "root-user-action",
    "timeout",
}
# Packages and megabytes for a machine without a GPU, with the torch of constraints.txt.
OF_TRIOLET, OF_DEVELOPMENT = (76, 250), (156, 640)
# Search every index for a wheel, like pip; by default uv stops at the first with the name.
LIKE_PIP = {"UV_INDEX_STRATEGY": "unsafe-best-match"}


class Untranslatable(Exception):
    """A pip setting that may change what is installed has no translation for uv."""


def settings(listing: str) -> dict[str, str]:
    """Return pip's settings from the output of `pip config list`: environment, [install],
    [global]."""
    found: dict[tuple[int, str], str] = {}
    precedence = {"global": 0, "install": 1, ":env:": 2}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.partition(".")
        if section in precedence:
            found[precedence[section], option] = str(ast.literal_eval(value))
    return {option: found[rank, option] for rank, option in sorted(found)}


def constraints(of_pip: dict[str, str]) -> list[str]:
    """Return uv's arguments for constraints in pip's settings. As arguments they add to those of
    the command; uv ignores constraints in its environment if the command has any."""
    return [
        word for file in of_pip.get("constraint", "").split() for word in ("--constraint", file)
    ]


def environment(of_pip: dict[str, str]) -> dict[str, str]:
    """Return uv's environment for pip's settings, except `constraints`.

    Raises:
        Untranslatable: a setting has no translation.
    """
    told = dict(LIKE_PIP)
    for option, value in of_pip.items():
        if option in WITHOUT_MEANING or option == "constraint":
            continue
        if option not in TRANSLATIONS:
            raise Untranslatable(f"pip's setting {option} has no translation for uv")
        name, separator = TRANSLATIONS[option]
        told[name] = separator.join(value.split()) if separator else value
    return told


def say(text: str) -> None:
    """Write a line of progress to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def install(arguments: list[str]) -> int:
    """Install with uv, or else with pip. Return the exit code."""
    config = [*PIP, "config", "list"]
    listing = subprocess.run(config, stdout=subprocess.PIPE, text=True, check=True)
    of_pip = settings(listing.stdout)
    try:
        told = environment(of_pip)
    except Untranslatable as problem:
        say(f"{problem}: using pip instead")
    else:
        say("Installing uv first (18 MB) if it is missing: it is faster than pip.")
        # Twice quiet: pip warns about each folder without uv.
        if subprocess.run([*PIP, "install", "-qq", UV], check=False).returncode == 0:
            uv = [*UV_PIP, "install", "--python", sys.executable, *constraints(of_pip), *arguments]
            if subprocess.run(uv, env=told | os.environ, check=False).returncode == 0:
                return 0
        say("uv is unavailable or failed: using pip instead")
    pip = [*PIP, "install", "--no-compile", *arguments]
    return subprocess.run(pip, check=False).returncode


def main(arguments: list[str]) -> int:
    """Install, and report the size before and the duration after."""
    began_at = time.monotonic()
    is_for_development = any("[dev]" in one for one in arguments)
    packages, megabytes = OF_DEVELOPMENT if is_for_development else OF_TRIOLET
    say(
        f"Installing missing ones of {packages} packages into {sys.prefix}: up to {megabytes} "
        "MB to download, or several GB if the package index has a CUDA build of torch, and kernels "
        "to compile. This takes a minute on an idle machine with a fast connection, else several."
    )
    code = install(arguments)
    took_s = time.monotonic() - began_at
    if code == 0:
        say(f"Installed after {took_s:.0f} s.")
    else:
        say(f"Installation failed after {took_s:.0f} s; see the lines above for the reason.")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
