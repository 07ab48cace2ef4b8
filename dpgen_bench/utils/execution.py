"""The values of `runtime.precision` and `runtime.compile`; commands check them before PyTorch is imported."""

from __future__ import annotations

from typing import Literal

Precision = Literal["fp32", "tf32", "bf16"]
Backend = Literal["none", "inductor", "cudagraphs"]
