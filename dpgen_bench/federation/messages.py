"""Messages between the server and its clients: named tensors and a few numbers and words, as safetensors bytes.

What comes over a wire may be anything, so reading runs no code of the sender: there is no pickle in a message.
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
# All header fields are one entry of safetensors' metadata, because it writes several in an order of no meaning.
HEADER = "header"
MOST_WORDS = 300  # characters of what came that an error quotes

Field = int | str
Expected = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class Malformed(ValueError):
    """Bytes that are no message, or not the message that was expected.

    Its text names what came, so it is as private as the sender's answer is.
    """


def encode(tensors: Mapping[str, Tensor], header: Mapping[str, Field] = MappingProxyType({})) -> bytes:
    """One message. Equal tensors and header fields give equal bytes, in whatever order they are named.

    Args:
        tensors: by name; dense, on any device, of a type in `DTYPES`; non-finite values pass.
        header: integers and words by name.

    Raises:
        ValueError: for another kind of tensor or field.
    """
    whole = {}
    for name, tensor in sorted(tensors.items()):
        if not isinstance(name, str) or name == "__metadata__":
            raise ValueError(f"expected tensors named by words other than '__metadata__', got {name!r}.")
        if not isinstance(tensor, Tensor):
            raise ValueError(f"expected a tensor as {name!r}, got {type(tensor).__name__}.")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in DTYPES:
            raise ValueError(
                f"expected {name!r} as a dense tensor of a type among {', '.join(map(_word, DTYPES))}, got "
                f"{_word(tensor.dtype)} ({tensor.layout}, on {tensor.device})."
            )
        # A copy: safetensors refuses tensors that share memory, as views of one tensor do.
        whole[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    for field, value in header.items():
        if not isinstance(field, str) or not _is_field(value):
            raise ValueError(f"expected header fields as integers or words by name, got {field!r}: {value!r}.")
    return save(whole, {HEADER: json.dumps(dict(header), sort_keys=True)})


def decode(
    data: bytes, expect: Expected | None = None, *, finite: bool = False
) -> tuple[dict[str, Tensor], dict[str, Field]]:
    """(tensors by name, header fields by name) of a message.

    Args:
        expect: type and shape of each tensor by name; no other tensors may come. None takes any.
        finite: refuse NaN and infinite values.

    Guarantees: raises nothing but `Malformed`, whatever the bytes are. The tensors are the caller's own, on the CPU.

    Raises:
        Malformed: with what was expected and what came.
    """
    if not isinstance(data, bytes):
        raise Malformed(f"expected a message in bytes, got {type(data).__name__}.")
    try:
        tensors, header = load(data), _header(data)
    except Malformed:
        raise
    except Exception as error:  # of many types, from safetensors, json and torch
        raise Malformed(
            f"expected a whole message, got {len(data)} bytes that are none: {_clip(str(error))}"
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
        wanted = f"{_word(dtype)} {list(shape)}" if expect else f"one of {', '.join(map(_word, DTYPES))}"
        raise Malformed(f"expected tensor {name} as {wanted}, got {_word(tensor.dtype)} {list(tensor.shape)}.")
    # A truth value is a byte, and PyTorch computes nonsense from one that is neither 0 nor 1.
    if dtype == torch.bool and (tensor.view(torch.uint8) > 1).any():
        raise Malformed(f"expected tensor {name} to hold true and false only, got other bytes.")
    if finite and dtype.is_floating_point and not tensor.isfinite().all():
        bad = int((~tensor.isfinite()).sum())
        raise Malformed(f"expected finite values in tensor {name}, got {bad} of {tensor.numel()} that are not.")


def _header(data: bytes) -> dict[str, Field]:
    """The header fields; `load` has made sure that the bytes are a JSON object after its length, and then tensors."""
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__")
    if not isinstance(metadata, dict) or metadata.keys() != {HEADER}:
        raise Malformed(f"expected metadata with the one entry {HEADER!r}, got {_clip(repr(metadata))}.")
    header = json.loads(metadata[HEADER])
    if not isinstance(header, dict) or not all(map(_is_field, header.values())):
        raise Malformed(f"expected header fields that are integers or words, got {_clip(metadata[HEADER])}.")
    return header


def _is_field(value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _clip(text: str) -> str:
    return text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]}..."
