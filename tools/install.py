"""Installs into the environment of the Python that runs it: `tools/install.py ARGUMENTS OF PIP`.

uv does it where it can: it unpacks a package once and links it afterwards, on all cores, where pip
takes a minute of one core. uv reads none of pip's settings, so they are translated. With a setting
that has no translation here, and where uv cannot be had or fails, pip does it. Both show their own
progress: bars on a terminal, plain lines elsewhere.
"""

import ast
import os
import subprocess
import sys
import time

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
# Packages and megabytes of a machine without a GPU, with the torch of constraints.txt.
OF_TRIOLET, OF_DEVELOPMENT = (76, 250), (152, 590)
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


def constraints(of_pip: dict[str, str]) -> list[str]:
    """uv's arguments for the constraints of pip's settings. As arguments they add to those of the
    command; uv drops those of its environment when the command names any."""
    return [
        word for file in of_pip.get("constraint", "").split() for word in ("--constraint", file)
    ]


def environment(of_pip: dict[str, str]) -> dict[str, str]:
    """uv's environment with the same meaning, apart from `constraints`.

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
    """Writes a line of progress to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def install(arguments: list[str]) -> int:
    """Installs with uv, else with pip; the exit code of the one that did it."""
    config = [*PIP, "config", "list"]
    listing = subprocess.run(config, stdout=subprocess.PIPE, text=True, check=True)
    of_pip = settings(listing.stdout)
    try:
        told = environment(of_pip)
    except Untranslatable as problem:
        say(f"{problem}: pip installs")
    else:
        say("uv is fetched first (18 MB), unless it is there: it installs faster than pip.")
        # Twice quiet: pip warns of each folder in which there is no uv.
        if subprocess.run([*PIP, "install", "-qq", UV], check=False).returncode == 0:
            uv = [*UV_PIP, "install", "--python", sys.executable, *constraints(of_pip), *arguments]
            if subprocess.run(uv, env=told | os.environ, check=False).returncode == 0:
                return 0
        say("uv cannot be had, or did not do it: pip installs")
    pip = [*PIP, "install", "--no-compile", *arguments]
    return subprocess.run(pip, check=False).returncode


def main(arguments: list[str]) -> int:
    """Installs, and says before how much that is and afterwards how long it took."""
    began_at = time.monotonic()
    is_for_development = any("[dev]" in one for one in arguments)
    packages, megabytes = OF_DEVELOPMENT if is_for_development else OF_TRIOLET
    say(
        f"Installing what is missing of {packages} packages into {sys.prefix}: up to {megabytes} "
        "MB to download, or several GB where the package index gives a CUDA build of torch, and "
        "kernels to compile. One minute on an idle machine with a fast connection, else several."
    )
    code = install(arguments)
    took_s = time.monotonic() - began_at
    if code == 0:
        say(f"Installed after {took_s:.0f} s.")
    else:
        say(f"Not installed: it failed after {took_s:.0f} s, and the lines above say why.")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
