"""Installs into the environment of the Python that runs it: `tools/install.py ARGUMENTS OF PIP`.

uv does it where it can: it unpacks a package once and links it afterwards, on all cores, where pip
takes a minute of one core. uv reads none of pip's settings, so they are translated. With a setting
that has no translation here, and where uv cannot be had or fails, pip does it.
"""

import ast
import os
import subprocess
import sys

UV = "uv>=0.9,<1"

# What pip's settings are called in uv's environment, and what separates the values of a list there.
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
# They change nothing of what is installed. pip's timeout may be a fraction, which uv refuses.
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
# A wheel is looked for in every index, as pip does; uv stops at the first that knows the name.
LIKE_PIP = {"UV_INDEX_STRATEGY": "unsafe-best-match"}


class Untranslatable(Exception):
    """pip has a setting which may change what is installed, and which uv would not get."""


def settings(listing: str) -> dict[str, str]:
    """pip's settings as `pip config list` tells them: the environment, [install], [global]."""
    found: dict[tuple[int, str], str] = {}
    precedence = {"global": 0, "install": 1, ":env:": 2}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.partition(".")
        if section in precedence:
            found[precedence[section], option] = str(ast.literal_eval(value))
    return {option: found[rank, option] for rank, option in sorted(found)}


def environment(of_pip: dict[str, str]) -> dict[str, str]:
    """uv's environment with the same meaning.

    Raises:
        Untranslatable: a setting has no translation.
    """
    told = dict(LIKE_PIP)
    for option, value in of_pip.items():
        if option in WITHOUT_MEANING:
            continue
        if option not in TRANSLATIONS:
            raise Untranslatable(f"pip's setting {option} has no translation for uv")
        name, separator = TRANSLATIONS[option]
        told[name] = separator.join(value.split()) if separator else value
    return told


def install(arguments: list[str]) -> int:
    """Installs with uv, else with pip; the exit code of the one that did it."""
    config = [*PIP, "config", "list"]
    listing = subprocess.run(config, stdout=subprocess.PIPE, text=True, check=True)
    try:
        told = environment(settings(listing.stdout))
    except Untranslatable as problem:
        sys.stderr.write(f"{problem}: pip installs\n")
    else:
        if subprocess.run([*PIP, "install", "--quiet", UV], check=False).returncode == 0:
            uv = [*UV_PIP, "install", "--quiet", "--python", sys.executable, *arguments]
            if subprocess.run(uv, env=told | os.environ, check=False).returncode == 0:
                return 0
        sys.stderr.write("uv cannot be had, or did not do it: pip installs\n")
    pip = [*PIP, "install", "--quiet", "--no-compile", *arguments]
    return subprocess.run(pip, check=False).returncode


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:]))
