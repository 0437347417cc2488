"""What all tests share."""

import os
from pathlib import Path

from hypothesis import settings

# Examples have no deadline of their own: a busy machine is no bug.
settings.register_profile("house", deadline=None)
settings.load_profile("house")

# Triton decides when it is first imported, by whomever, whether its kernels are compiled or
# interpreted. Without an NVIDIA driver only the latter can be.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
