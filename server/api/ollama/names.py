"""Names of models as Ollama's clients write them: with a tag, which is `latest` here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.config import ANY_MODEL

from ..intake import check_model

if TYPE_CHECKING:
    from triolet.config import ServerConfig

TAG: Final = ":latest"


def served_model(name: str, config: ServerConfig) -> str:
    """Return a model's name without the tag, unless it is served by the whole.

    Raises:
      RequestError: 404, it is not served.
    """
    shown = name if config.serves(name) else name.removesuffix(TAG)
    check_model(shown, config)
    return shown


def listed_names(config: ServerConfig) -> list[str]:
    """Return every name of the model as it is listed: with a tag."""
    names = (config.model_name, *(one for one in config.model_aliases if one != ANY_MODEL))
    return [name if ":" in name else name + TAG for name in names]
