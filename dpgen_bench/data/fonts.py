"""Characters of the faces in a folder of fonts, as distance fields: public data, which the methods with fonts draw.

PIL draws each character once. Its distance field holds how far each pixel is inside or outside of the character, so
that a drawing can be turned, stretched and made thicker without drawing it again (`dpgen_bench.nets.glyphs`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import distance_transform_edt
from torch import Tensor

from dpgen_bench.nets.glyphs import FIELD, SIZE
from dpgen_bench.utils.validation import Checked

SUFFIXES = (".ttf", ".otf", ".woff")
_DRAWN = 2 * SIZE  # pixels in which PIL draws, for accurate distances
_FILL = 0.72  # the longer side of a character's box, as a share of the image
_LATIN = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmb10", "cmr10", "cmss10", "cmti10", "cmtt10")
_ABSENT = "\U0010fffd"  # a character that no font has: its drawing is that of missing characters


@dataclass(kw_only=True)
class FontSettings(Checked):
    """The settings of methods that draw with fonts.

    Args:
        fonts: a folder of TrueType, OpenType or WOFF files; None takes DejaVu, STIX and Computer Modern, which
            matplotlib installs.
        fonts_digest: the digest of the folder's usable fonts. It is required with `fonts`, so that a run's id depends
            on the fonts, and not on where their folder is.
        characters: the character of each class, in one text; None takes the names of the classes.
    """

    places: ClassVar[dict[str, str]] = {"fonts": "fonts_digest"}
    fonts: str | None
    fonts_digest: str | None
    characters: str | None

    def expect_data(self, class_names: Sequence[str], image_shape: Sequence[int]) -> None:
        """Check that the fonts have a character for each class, and the stated digest; raises as `read_glyphs`."""
        self.read_glyphs(class_names)

    def read_glyphs(self, class_names: Sequence[str]) -> Glyphs:
        """The characters of the classes, drawn with these fonts; see the function `read_glyphs`.

        Raises:
            ValueError: as that function, for another number of characters than classes, and for fonts with
                another digest.
        """
        characters = class_names if self.characters is None else tuple(self.characters)
        if len(characters) != len(class_names):
            raise ValueError(
                f"expected in method.characters one character for each of {len(class_names)} classes, got "
                f"{self.characters!r}; give {len(class_names)}."
            )
        glyphs = read_glyphs(self.fonts, tuple(characters))
        if (self.fonts is not None or self.fonts_digest is not None) and glyphs.digest != self.fonts_digest:
            raise ValueError(
                f"expected fonts with the digest that method.fonts_digest states ({self.fonts_digest}), got "
                f"{len(glyphs.fields)} faces with the digest {glyphs.digest}; set method.fonts_digest={glyphs.digest} "
                "to use these."
            )
        return glyphs


@dataclass(frozen=True)
class Glyphs:
    """The characters of all usable faces of a folder.

    Attributes:
        fields: distance fields uint8 [faces, characters, SIZE, SIZE]; see `dpgen_bench.nets.glyphs`.
        digest: a hash of the files of these faces.
    """

    fields: Tensor
    digest: str


@lru_cache(maxsize=4)
def read_glyphs(folder: str | None, characters: tuple[str, ...]) -> Glyphs:
    """Draw the characters in each face of a folder and its sub-folders that has all of them.

    Of faces with the same drawings, one is taken.

    Args:
        folder: a folder with TrueType, OpenType or WOFF files; None takes the fonts that matplotlib installs.
        characters: one character for each class.

    Raises:
        ValueError: for a folder that does not exist or has no font with all characters, or unless each element of
            `characters` is one character.
    """
    expect_characters(characters)
    root = _matplotlib_fonts() if folder is None else Path(folder).expanduser()
    if not root.is_dir():
        raise ValueError(
            f"expected method.fonts to be a folder with fonts, got {folder!r}, which is no folder; give a folder, or "
            "null for the fonts that matplotlib installs."
        )
    files = [path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()]
    if folder is None:  # matplotlib's other fonts have symbols in the place of characters
        files = [path for path in files if path.name.startswith(_LATIN)]
    # Faces are in the order of their hashes, so that they do not depend on names and sub-folders.
    hashes = sorted((hashlib.sha256(path.read_bytes()).hexdigest(), path) for path in files)
    fields, used, seen = [], [], set()
    for digest, path in hashes:
        drawings = _drawings(path, characters)
        if drawings is None or (key := drawings.tobytes()) in seen:
            continue
        seen.add(key)
        fields.append(np.stack([_distance_field(drawing) for drawing in drawings]))
        used.append(digest)
    if not fields:
        found = f"{len(files)} font files of which none has them" if files else "no file of such a font"
        raise ValueError(
            f"expected in method.fonts ({folder or 'the fonts that matplotlib installs'}) TrueType, OpenType or WOFF "
            f"fonts with the characters {' '.join(characters)}, got {found}; give another folder."
        )
    return Glyphs(torch.from_numpy(np.stack(fields)), hashlib.sha256("".join(used).encode()).hexdigest()[:16])


def expect_characters(names: Sequence[str]) -> None:
    """Check that each name of a class is a character that fonts can draw.

    Raises:
        ValueError: unless each name is one visible character, and each another.
    """
    others = [name for name in names if len(name) != 1 or not name.isprintable() or name.isspace()]
    if others:
        raise ValueError(
            f"expected classes that are characters, which fonts can draw, got {', '.join(map(repr, others[:5]))}; use "
            "a data set of characters, or give the character of each class, such as method.characters=AB for two."
        )
    if repeated := sorted({name for name in names if list(names).count(name) > 1}):
        raise ValueError(
            f"expected another character for each class, got {', '.join(map(repr, repeated))} for several; change "
            "method.characters."
        )


def _matplotlib_fonts() -> Path:
    import matplotlib  # not at the top of the module: other commands do not need it

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def _drawings(path: Path, characters: Sequence[str]) -> np.ndarray | None:
    """The characters as bool [characters, _DRAWN, _DRAWN], in the middle and of one size; None if the face lacks one.

    A face lacks a character if its drawing is empty, equal to that of another character, or the one that the face has
    for missing characters.
    """
    try:
        font = ImageFont.truetype(path, int(0.6 * _DRAWN))
        drawn = [_draw(font, text) for text in (*characters, _ABSENT)]
    except (OSError, ValueError):  # a damaged font, or one without outlines
        return None
    wanted, absent = [each for each in drawn[:-1] if each is not None], drawn[-1]
    if len(wanted) < len(characters) or len({each.tobytes() for each in wanted}) < len(wanted):
        return None
    missing = absent is not None and any(np.array_equal(each, absent) for each in wanted)
    return None if missing else np.stack(wanted)


def _draw(font: ImageFont.FreeTypeFont, text: str) -> np.ndarray | None:
    """The character in the middle, with its longer side at _FILL of the image; None if nothing is drawn."""
    left, top, right, bottom = font.getbbox(text)
    width, height = int(right - left), int(bottom - top)
    if not (0 < width < 4 * _DRAWN and 0 < height < 4 * _DRAWN):
        return None
    tight = Image.new("L", (width, height))
    ImageDraw.Draw(tight).text((-left, -top), text, fill=255, font=font)
    box = tight.getbbox()
    if box is None:
        return None
    tight = tight.crop(box)
    scale = _FILL * _DRAWN / max(tight.size)
    size = (max(1, round(tight.width * scale)), max(1, round(tight.height * scale)))
    image = Image.new("L", (_DRAWN, _DRAWN))
    image.paste(tight.resize(size, Image.Resampling.BILINEAR), ((_DRAWN - size[0]) // 2, (_DRAWN - size[1]) // 2))
    return np.asarray(image) > 127


def _distance_field(drawing: np.ndarray) -> np.ndarray:
    """uint8 [SIZE, SIZE]: the signed distance to the edge, FIELD steps per image side, 128 at the edge."""
    inside, outside = distance_transform_edt(drawing), distance_transform_edt(~drawing)
    signed = (inside - outside) / _DRAWN * FIELD
    step = _DRAWN // SIZE
    pooled = signed.reshape(SIZE, step, SIZE, step).mean(axis=(1, 3))
    return np.clip(np.round(pooled) + 128, 0, 255).astype(np.uint8)
