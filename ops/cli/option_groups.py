"""Lets several commands share a group of options, each written once.

A group is a plain function: its parameters are the options, its result is what a command gets for
them. Knows nothing of any option.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def with_groups(**groups: Callable[..., object]) -> Callable[[Callable[..., None]], Any]:
    """Replace parameters of a command, by name, by the options of groups.

    The command then receives each group's result in the parameter's place.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = {
            name: list(inspect.signature(group, eval_str=True).parameters.values())
            for name, group in groups.items()
        }
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p for p in own if p.name not in groups]
        parameters += [p for group in options.values() for p in group]

        def run(**values: object) -> None:
            results = {
                name: group(**{p.name: values.pop(p.name) for p in options[name]})
                for name, group in groups.items()
            }
            command(**values, **results)

        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        )
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate
