"""Numbers that JSON does not have, as text that `float` reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any) -> Any:
    """The value with "inf", "-inf" and "nan" in place of such numbers, also within mappings and lists."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
