"""Builds objects from configs (`_target_` and arguments) by Hydra, whose wrapper around their errors is removed."""

from __future__ import annotations

from typing import Any

import hydra.utils
from hydra.errors import InstantiationException


def instantiate(config: Any, **options: Any) -> Any:
    """The object of a config, as `hydra.utils.instantiate` makes it.

    Raises:
        Exception: the error of the class itself. Hydra's error around it repeats its text, quoted, on a second line.
    """
    try:
        return hydra.utils.instantiate(config, **options)
    except InstantiationException as error:
        if isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise
