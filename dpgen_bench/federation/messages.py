"""Encodes and decodes messages between the server and its clients: named tensors and a header, as safetensors bytes.

Received bytes may be anything, so decoding never runs code of the sender: messages contain no pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

import torch
from safetensors.torch import load, save
from torch import Tensor

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
# The header fields are one entry of safetensors' metadata, because safetensors writes several in an arbitrary order.
HEADER = "header"
MAX_QUOTED = 300  # characters of received data that an error message quotes

Field = int | str
Expected = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class Malformed(ValueError):
    """Raised for bytes that are no message, or not the message that was expected.

    The error's text quotes what was received, so it is as private as the sender's answer.
    """


def encode(tensors: Mapping[str, Tensor], header: Mapping[str, Field] = MappingProxyType({})) -> bytes:
    """Encode a message. Equal tensors and header fields give equal bytes, independently of their order.

    Args:
        tensors: dense tensors by name, on any device, of a type in `DTYPES`; non-finite values are allowed.
        header: integers and strings by name.

    Raises:
        ValueError: for another kind of tensor or header field.
    """
    contiguous = {}
    for name, tensor in sorted(tensors.items()):
        if not isinstance(name, str) or name == "__metadata__":
            raise ValueError(f"expected tensor names as strings other than '__metadata__', got {name!r}.")
        if not isinstance(tensor, Tensor):
            raise ValueError(f"expected a tensor as {name!r}, got {type(tensor).__name__}.")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in DTYPES:
            raise ValueError(
                f"expected {name!r} as a dense tensor of a type among {', '.join(map(_format_dtype, DTYPES))}, got "
                f"{_format_dtype(tensor.dtype)} ({tensor.layout}, on {tensor.device})."
            )
        # Copied, because safetensors refuses tensors that share memory, such as two views of one tensor.
        contiguous[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    for field, value in header.items():
        if not isinstance(field, str) or not _is_field(value):
            raise ValueError(f"expected header fields as integers or strings by name, got {field!r}: {value!r}.")
    return save(contiguous, {HEADER: json.dumps(dict(header), sort_keys=True)})


def decode(
    data: bytes, expect: Expected | None = None, *, finite: bool = False
) -> tuple[dict[str, Tensor], dict[str, Field]]:
    """Decode a message.

    Args:
        expect: the type and shape of each tensor by name; other tensors are refused. None accepts any tensors.
        finite: whether NaN and infinite values are refused.

    Returns:
        the tensors by name, on the CPU and sharing no memory with `data`, and the header fields by name.

    Raises:
        Malformed: for any other bytes, and no other error is ever raised. The text says what was expected and what was
            received.
    """
    if not isinstance(data, bytes):
        raise Malformed(f"expected a message in bytes, got {type(data).__name__}.")
    try:
        tensors, header = load(data), _header(data)
    except Malformed:
        raise
    except Exception as error:  # safetensors, json and torch raise many types
        raise Malformed(
            f"expected a whole message, got {len(data)} bytes that are not one: {_clip(str(error))}"
        ) from error
    if expect is not None and tensors.keys() != expect.keys():
        raise Malformed(f"expected tensors named {sorted(expect)}, got {_clip(str(sorted(tensors)))}.")
    for name, tensor in tensors.items():
        _expect(name, tensor, None if expect is None else expect[name], finite)
    return tensors, header


def _expect(name: str, tensor: Tensor, expect: tuple[torch.dtype, tuple[int, ...]] | None, finite: bool) -> None:
    name = _clip(repr(name))
    dtype, shape = (tensor.dtype, tensor.shape) if expect is None else expect
    if tensor.dtype not in DTYPES or (tensor.dtype, tensor.shape) != (dtype, tuple(shape)):
        expected = (
            f"{_format_dtype(dtype)} {list(shape)}" if expect else f"one of {', '.join(map(_format_dtype, DTYPES))}"
        )
        raise Malformed(
            f"expected tensor {name} as {expected}, got {_format_dtype(tensor.dtype)} {list(tensor.shape)}."
        )
    # A boolean is stored as a byte, and PyTorch computes wrong results from bytes other than 0 and 1.
    if dtype == torch.bool and (tensor.view(torch.uint8) > 1).any():
        raise Malformed(f"expected tensor {name} to hold true and false only, got other bytes.")
    if finite and dtype.is_floating_point and not tensor.isfinite().all():
        bad = int((~tensor.isfinite()).sum())
        raise Malformed(f"expected finite values in tensor {name}, got {bad} of {tensor.numel()} that are not.")


def _header(data: bytes) -> dict[str, Field]:
    """The header fields of a message whose bytes `load` has accepted: a length, a JSON object, then tensors."""
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__")
    if not isinstance(metadata, dict) or metadata.keys() != {HEADER}:
        raise Malformed(f"expected metadata with the one entry {HEADER!r}, got {_clip(repr(metadata))}.")
    header = json.loads(metadata[HEADER])
    if not isinstance(header, dict) or not all(map(_is_field, header.values())):
        raise Malformed(f"expected header fields that are integers or strings, got {_clip(metadata[HEADER])}.")
    return header


def _is_field(value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _clip(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."
