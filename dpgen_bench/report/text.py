"""Convert settings, values and pictures for the report: to text, to JSON-able values, and to data URIs."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from dpgen_bench.store.statistics import Summary
from dpgen_bench.utils.json_numbers import to_json

LONGEST = 320  # pixels of the longer side of a sample grid in the report
GREYS = 16  # shades of a grey image; an image of noise then takes 20 kB


def templates() -> Environment:
    """The report's templates, which escape every text. The filter `code` writes `text` between backticks as code."""
    environment = Environment(
        loader=PackageLoader("dpgen_bench.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = with_code
    return environment


def with_code(text: str) -> Markup:
    """The text in HTML, escaped, with `text` between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def plain(value: Any) -> Any:
    """The value for JSON: texts replace infinite and NaN numbers, and keys are sorted.

    Raises:
        ValueError: for a value of another type than JSON's.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return to_json(value)
    raise ValueError(f"expected a value that JSON has, got {value!r} of type {type(value).__name__}.")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value})
    return flat


def describe_value(value: Any) -> str:
    """A setting as text: `null`, `true`, `0.5`, `[1, 2]`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe_value, value))}]"
    return str(value)


def described(summary: Summary) -> str:
    """The summary as text, with counts such as 2,000 samples without decimals."""
    mean, spread = summary.mean, bool(summary.std_seeds or summary.std_repeats)
    return f"{mean:,.0f}" if not spread and mean.is_integer() and abs(mean) >= 100 else summary.text()


def once(lines: Iterable[str]) -> list[str]:
    """Each line once, in the order of their first appearance."""
    return list(dict.fromkeys(lines))


def data_uri(content: bytes, kind: str) -> str:
    """`data:KIND;base64,...`"""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def small_picture(path: Path) -> str:
    """An image file as a data URI, at most `LONGEST` pixels wide and high.

    Grey images become PNG with 16 shades, which keeps edges; others WebP, because a palette distorts colours.

    Raises:
        OSError: if the file is not a readable image.
    """
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    image.thumbnail((LONGEST, LONGEST), Image.Resampling.LANCZOS)
    pixels = np.asarray(image)
    kept = io.BytesIO()
    if (pixels == pixels[..., :1]).all():
        image.convert("L").quantize(GREYS).save(kept, format="PNG", optimize=True)
        return data_uri(kept.getvalue(), "image/png")
    image.save(kept, format="WEBP", quality=60, method=6)
    return data_uri(kept.getvalue(), "image/webp")


def describe_time(seconds: float) -> str:
    """`45 s`, `18 min` or `3.2 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
