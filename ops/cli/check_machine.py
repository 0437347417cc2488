"""`triolet doctor`'s checks of the machine (Python, packages, CPU, memory, torch, GPU, limits), and
the result type of all its checks."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
import sysconfig
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.memory import available_memory_bytes
from triolet.units import show_size

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_PYTHON: Final = (3, 11)
MIN_FILES: Final = 4096 + 256
"""ServerConfig.max_connections, plus the files that the process itself opens."""
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(==|>=)\s*([0-9][0-9.]*)")
_NUMBER: Final = re.compile(r"\d+")


class FindingStatus(StrEnum):
    """Severity of a finding. Only `fail` keeps Triolet from working."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """One row of the report.

    Attributes:
      subject: what was checked.
      status: severity.
      detail: what was found.
      remedy: what to do; empty if nothing.
    """

    subject: str
    status: FindingStatus
    detail: str
    remedy: str = ""


def check_python() -> Finding:
    """Check the version of the interpreter."""
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < MIN_PYTHON:
        return Finding("Python", FindingStatus.FAIL, detail, "install Python 3.11 or newer")
    return Finding("Python", FindingStatus.OK, detail)


def check_packages() -> Finding:
    """Compare installed packages with Triolet's requirements, exact pins included."""
    remedy = "install Triolet again: pip install --force-reinstall triolet, or make install"
    try:
        wanted = [line for line in requires("triolet") or [] if "extra ==" not in line]
    except PackageNotFoundError:
        return Finding("Packages", FindingStatus.FAIL, "triolet itself is not installed", remedy)
    problems = [problem for line in wanted if (problem := package_problem(line, version))]
    if problems:
        return Finding("Packages", FindingStatus.FAIL, "; ".join(problems), remedy)
    return Finding("Packages", FindingStatus.OK, f"{len(wanted)} present, exact pins met")


def package_problem(requirement: str, installed_version: Callable[[str], str]) -> str | None:
    """Return what is wrong with one requirement (`name==1.2` or `name>=1.2`), or None."""
    match = _REQUIREMENT.match(requirement)
    if match is None:
        return f"requirement {requirement!r} has an unknown form"
    name, relation, wanted = match.groups()
    try:
        found = installed_version(name)
    except PackageNotFoundError:
        return f"{name} is missing"
    numbers = [int(n) for n in _NUMBER.findall(found.partition("+")[0])]
    wanted_numbers = [int(n) for n in _NUMBER.findall(wanted)]
    is_met = found == wanted if relation == "==" else numbers >= wanted_numbers
    return None if is_met else f"{name} is {found}, wanted {relation}{wanted}"


def check_cpu() -> Finding:
    """Check the number of cores and the vector instructions that the kernels use."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    flags = _cpu_flags()
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    detail = f"{cores} cores, {platform.machine()}" + (f", {' '.join(known)}" if known else "")
    if platform.machine() in {"x86_64", "AMD64"} and flags and "avx2" not in flags:
        return Finding(
            "CPU", FindingStatus.WARN, detail, "without AVX2, generation is many times slower"
        )
    if cores < 2:
        return Finding(
            "CPU",
            FindingStatus.WARN,
            detail,
            "on one core, prefill and decode slow each other down",
        )
    return Finding("CPU", FindingStatus.OK, detail)


def _cpu_flags() -> frozenset[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return frozenset()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def check_memory(wanted_bytes: int | None) -> Finding:
    """Compare free memory with the memory that the fleet needs (None: unknown)."""
    available = available_memory_bytes()
    if available is None:
        return Finding("Memory", FindingStatus.OK, "this system does not report free memory")
    known = "the need of the fleet is unknown until its model can be read"
    if wanted_bytes is not None:
        known = f"the fleet needs about {show_size(wanted_bytes)}"
    detail = f"{show_size(available)} free; {known}"
    if wanted_bytes is not None and available < wanted_bytes:
        return Finding(
            "Memory", FindingStatus.WARN, detail, "use smaller KV pools, such as --kv-pool 128MiB"
        )
    return Finding("Memory", FindingStatus.OK, detail)


def check_torch() -> list[Finding]:
    """Load torch and check that its build fits the machine."""
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = "install Triolet again; on a machine without GPU with --constraint constraints.txt"
        return [Finding("torch", FindingStatus.FAIL, f"cannot be loaded: {error}", remedy)]
    cuda = torch.version.cuda
    detail = f"{torch.__version__}, {torch.get_num_threads()} threads by default"
    torch_row = Finding("torch", FindingStatus.OK, detail)
    driver = driver_version()
    has_driver = driver is not None or shutil.which("nvidia-smi") is not None
    if not torch.cuda.is_available():
        if has_driver and cuda is None:
            return [
                torch_row,
                Finding(
                    "GPU",
                    FindingStatus.WARN,
                    "a driver is installed, but torch is the CPU build",
                    "install torch for CUDA: pip install 'torch>=2.11' without constraints.txt",
                ),
            ]
        if has_driver:
            remedy = "compare `nvidia-smi` with the CUDA version of torch"
            return [
                torch_row,
                Finding("GPU", FindingStatus.WARN, f"torch (CUDA {cuda}) cannot use it", remedy),
                check_driver(driver, cuda),
            ]
        return [torch_row, Finding("GPU", FindingStatus.OK, "none; the model runs on the CPU")]
    names = ", ".join(
        torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())
    )
    return [
        torch_row,
        Finding("GPU", FindingStatus.OK, f"{names}, CUDA {cuda}"),
        check_driver(driver, cuda),
        *check_triton(_header_directory()),
        *check_flash(),
    ]


def torch_unloaded() -> Finding:
    """Report the installed version of torch without loading it."""
    try:
        detail = f"{version('torch')}; not loaded because another check failed"
    except PackageNotFoundError:
        remedy = "install Triolet again; on a machine without GPU with --constraint constraints.txt"
        return Finding("torch", FindingStatus.FAIL, "is missing", remedy)
    return Finding("torch", FindingStatus.OK, detail)


def _header_directory() -> Path:
    """Return where Triton looks for Python.h; on Debian that is not below /usr/local."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_path("include", scheme.replace("posix_local", "posix_prefix")))


_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION: Final = re.compile(r"\b(\d{3,})\.\d+(?:\.\d+)?\b")
OLDEST_DRIVERS: Final = {12: 525, 13: 580}
"""CUDA major version to the oldest driver major version that runs it (NVIDIA's release notes)."""
TRITON_REQUIREMENT: Final = "triton>=3.6"
FLASH_VERSION: Final = "2.8.3"
"""Later versions synchronize with the GPU in each decode call."""


def driver_version(file: Path = _DRIVER_FILE) -> str | None:
    """Return the version of the loaded NVIDIA driver, or None."""
    if not file.exists():
        return None
    match = _DRIVER_VERSION.search(file.read_text(encoding="utf-8", errors="replace"))
    return match[0] if match else None


def check_driver(driver: str | None, cuda: str | None) -> Finding:
    """Compare the driver with the CUDA version that torch was built for."""
    subject = "NVIDIA driver"
    if driver is None:
        return Finding(subject, FindingStatus.OK, "its version cannot be read here")
    oldest = OLDEST_DRIVERS.get(int((cuda or "0").partition(".")[0]), 0)
    if int(driver.partition(".")[0]) < oldest:
        remedy = f"install driver {oldest} or newer, or torch for an older CUDA"
        return Finding(subject, FindingStatus.WARN, f"{driver}, too old for CUDA {cuda}", remedy)
    return Finding(subject, FindingStatus.OK, driver)


def check_triton(include: Path) -> list[Finding]:
    """Check Triton, and the compiler and headers that it builds kernel launchers with.

    Args:
      include: directory of this Python's headers.
    """
    findings = [_check_triton_package()]
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is not None and shutil.which(compiler) is not None:
        findings.append(Finding("C compiler", FindingStatus.OK, compiler))
    else:
        findings.append(
            Finding(
                "C compiler",
                FindingStatus.WARN,
                "none found" if compiler is None else f"CC is {compiler}, which does not run",
                "Triton builds a launcher for each kernel: install gcc or clang, or set CC",
            )
        )
    if (include / "Python.h").exists():
        findings.append(Finding("Python.h", FindingStatus.OK, str(include)))
    else:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        remedy = f"Triton's launchers need it: install {package} (Fedora: python3-devel)"
        findings.append(Finding("Python.h", FindingStatus.WARN, f"not in {include}", remedy))
    return findings


def check_flash() -> list[Finding]:
    """Check the version of flash-attn if it is installed. It is optional."""
    try:
        found = version("flash-attn")
    except PackageNotFoundError:
        return []
    if found.startswith(FLASH_VERSION):
        use = "--backend flash --set worker.engine.block_size=256"
        return [Finding("flash-attn", FindingStatus.OK, f"{found}: {use}")]
    detail = f"{found}, wanted {FLASH_VERSION}, which the backend was written for"
    return [Finding("flash-attn", FindingStatus.WARN, detail, "pip install 'triolet[flash]'")]


def _check_triton_package() -> Finding:
    problem = package_problem(TRITON_REQUIREMENT, version)
    if problem is not None:
        remedy = "pip install 'triolet[gpu]', then --device cuda --backend triton"
        return Finding("Triton", FindingStatus.WARN, f"{problem}; attention uses sdpa", remedy)
    return Finding("Triton", FindingStatus.OK, f"{version('triton')}: serve with --backend triton")


KERNELS: Final = {
    "avx512bf16": ("avx512f", "avx512bw", "avx512vl", "avx512_bf16"),
    "avx512": ("avx512f", "avx512bw", "avx512vl"),
    "avx2": ("avx2", "fma"),
}
"""Builds of the engine's kernels, best first, and the CPU flags that each needs."""


def check_kernels(flags: frozenset[str] | None = None) -> Finding:
    """Check that compiled kernels for this CPU are installed."""
    present = _cpu_flags() if flags is None else flags
    fitting = [build for build, needed in KERNELS.items() if present.issuperset(needed)]
    if not fitting:
        return Finding("Kernels", FindingStatus.OK, "none for this CPU; torch is used")
    for build in fitting:
        if importlib.util.find_spec(f"engine.native._{build}") is not None:
            return Finding("Kernels", FindingStatus.OK, build)
    return Finding(
        "Kernels",
        FindingStatus.WARN,
        "not built; torch is used, at half the speed or less",
        "install a C compiler (gcc or clang), then install Triolet again",
    )


def check_open_files() -> Finding:
    """Check the limit of open files, which also limits connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft:,} per process"
    if soft < MIN_FILES:
        most = "" if hard == resource.RLIM_INFINITY else f" (at most {hard})"
        return Finding(
            "Open files",
            FindingStatus.WARN,
            detail,
            f"for many connections at once: ulimit -n 8192{most}, or lower server.max_connections",
        )
    return Finding("Open files", FindingStatus.OK, detail)
