"""Names for the hardware and kernels on which the exact bits of results depend.

Two workers with equal names compute the same bits for the same tokens. Retries on another worker
and shared prefix caches rely on this.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import xxhash

from .attention.traits import NATIVE
from .native.library import load_library
from .rope import RotaryTable

if TYPE_CHECKING:
    from torch import device as Device

    from .model_config import ModelConfig

PROBED_POSITIONS: Final = 256
_CPUINFO: Final = Path("/proc/cpuinfo")
MAX_HOST_CLASS: Final = 100
"""Length of a machine class's name."""
_TELLING: Final = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def arithmetic(backend: str, device: Device, model: ModelConfig) -> str:
    """Name the hardware and the kernels.

    Our kernels give the same bits in every build, on every processor and with any number of
    threads. What torch still computes beside them (angles, the sampler's exponentials) is tested by
    computing a digest. A model that torch computes depends on torch's version, on the instructions
    that its libraries choose for the processor, possibly on the number of threads, and on the GPU.
    """
    if backend == NATIVE.name:
        library = load_library()
        assert library is not None, "it was chosen"
        return f"{backend}-{library.arithmetic}-{elementary(model)}"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return f"{backend},torch-{torch.__version__},{where.replace(' ', '-')}"


def elementary(model: ModelConfig) -> str:
    """Return a digest of the elementary functions as torch computes them here."""
    table = RotaryTable(model.rope, model.head_dim, PROBED_POSITIONS, torch.device("cpu"))
    scores = torch.linspace(-30.0, 0.0, 4099)
    digest = xxhash.xxh3_64()
    for values in (*table.tables, scores.exp(), scores.log_softmax(-1)):
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _processor() -> str:
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    maker = re.search(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    present = frozenset(flags[1].split()) if flags else frozenset()
    known = [flag for flag in _TELLING if flag in present]
    name = maker[1] if maker else platform.machine()
    return "-".join([name, *known, f"{torch.get_num_threads()}-threads"])


def host_class(device: Device) -> str:
    """Return one word for the processor or GPU: machines with equal names are equally fast."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _model_name()
    return re.sub(r"[^!-~]+", "-", name.strip())[:MAX_HOST_CLASS] or platform.machine()


def _model_name() -> str:
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()
