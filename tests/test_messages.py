"""Tests what a message can contain, and which received bytes are refused."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from dpgen_bench.federation.messages import DTYPES, Malformed, decode, encode


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3)])
def test_decoding_inverts_encoding(dtype, shape):
    tensors = {"b": (torch.rand(shape) * 2).to(dtype), "a": torch.arange(4)}
    header = {"round": -(2**70), "kind": "grüße\n", "n": 0}
    back, fields = decode(encode(tensors, header), {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    assert fields == header
    assert [type(fields[name]) for name in ("round", "kind")] == [int, str]
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())
    back["a"] += 1  # shares no memory with what was encoded
    assert torch.equal(tensors["a"], torch.arange(4))


def test_equal_messages_are_equal_bytes_in_any_order_and_layout():
    whole = torch.arange(12.0).reshape(3, 4)
    views = {"x": whole.T, "y": whole[1], "z": whole}  # not contiguous, and in shared memory
    copies = {name: views[name].contiguous().clone().requires_grad_() for name in "zyx"}
    assert encode(views, {"b": 1, "a": "2", "c": 3}) == encode(copies, {"c": 3, "a": "2", "b": 1})
    assert encode({}) == encode({}, {})
    assert decode(encode({})) == ({}, {})
    assert encode(views) != encode({**views, "x": whole.T + 1})


@pytest.mark.parametrize(
    ("tensors", "header", "error"),
    [
        ({"x": [1.0]}, {}, "expected a tensor"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, {}, "complex64"),
        ({"x": torch.eye(2).to_sparse()}, {}, "sparse"),
        ({"x": torch.zeros(2, device="meta")}, {}, "meta"),
        ({"__metadata__": torch.zeros(2)}, {}, "__metadata__"),
        ({}, {"x": 1.5}, "integers or strings"),
        ({}, {"x": True}, "integers or strings"),
        ({}, {1: 1}, "integers or strings"),
    ],
)
def test_other_tensors_and_header_fields_are_refused(tensors, header, error):
    with pytest.raises(ValueError, match=error):
        encode(tensors, header)


EXPECT = {"images": (torch.float32, (2, 3)), "labels": (torch.int64, (2,)), "held": (torch.bool, (3,))}


def message() -> bytes:
    tensors = {
        "images": torch.arange(6.0).reshape(2, 3),
        "labels": torch.tensor([1, 9]),
        "held": torch.tensor([True, False, True]),
    }
    return encode(tensors, {"round": 3, "kind": "answer"})


def expect_malformed_or_as_expected(data: object) -> bool:
    """Whether it was refused; anything but `Malformed` raises here."""
    try:
        tensors, header = decode(data, EXPECT, finite=True)
    except Malformed:
        return True
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == EXPECT
    assert tensors["images"].isfinite().all()
    assert tensors["held"].view(torch.uint8).max() <= 1
    assert all(type(value) in (int, str) for value in header.values())
    return False


def test_every_truncation_is_refused():
    whole = message()
    assert not expect_malformed_or_as_expected(whole)
    assert all(expect_malformed_or_as_expected(whole[:n]) for n in range(len(whole)))
    assert expect_malformed_or_as_expected(whole + b"\0")


@given(place=st.integers(0, len(message()) - 1), mask=st.integers(1, 255))
def test_a_changed_byte_is_refused_or_changes_only_a_value(place, mask):
    whole = bytearray(message())
    whole[place] ^= mask
    expect_malformed_or_as_expected(bytes(whole))


def test_a_flipped_bit_passes_only_in_a_value_or_a_text_of_the_header():
    whole = message()
    passed = set()
    for place in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        if not expect_malformed_or_as_expected(bytes(changed)):
            passed.add(place // 8)
    header = range(whole.index(b"kind"), whole.index(b'}"}'))
    values = range(len(whole) - (2 * 8 + 6 * 4 + 3), len(whole))
    assert set(values) <= passed <= {*header, *values}


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data):
    assert expect_malformed_or_as_expected(data)
    assert expect_malformed_or_as_expected(len(data).to_bytes(8, "little") + data)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), lambda x: st.lists(x, max_size=3)))
def test_a_header_with_other_values_is_refused(value):
    for text in (json.dumps({"a": value}), json.dumps(value), f"[{value}" * 3):
        if isinstance(value, str) and text.startswith("{"):
            continue
        with pytest.raises(Malformed):
            decode(save({}, {"header": text}))


def test_a_header_too_deep_for_the_parser_is_refused():
    with pytest.raises(Malformed):
        decode(save({}, {"header": "[" * 100_000}))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "0 bytes"),
        (pickle.dumps({"value": 1}), "expected a whole message"),
        ("text", "got str"),
        (save({}), "metadata"),
        (encode({}), r"named \['held', 'images', 'labels'\], got \[\]"),
        (encode({**decode(message())[0], "more": torch.zeros(1)}), "more"),
        (
            encode({**decode(message())[0], "labels": torch.zeros(3, dtype=torch.int64)}),
            r"int64 \[2\], got int64 \[3\]",
        ),
        (encode({**decode(message())[0], "labels": torch.zeros(2)}), r"int64 \[2\], got float32 \[2\]"),
        (encode({**decode(message())[0], "images": torch.tensor([[1, 2, 3], [4, 5, torch.nan]])}), "1 of 6"),
        (encode({**decode(message())[0], "images": torch.full((2, 3), -torch.inf)}), "6 of 6"),
        (save({"x": torch.zeros(2, dtype=torch.complex64)}, {"header": "{}"}), r"named|complex64"),
    ],
)
def test_errors_name_what_was_expected_and_what_was_received(data, error):
    with pytest.raises(Malformed, match=error):
        decode(data, EXPECT, finite=True)


def test_values_that_are_not_finite_pass_unless_refused():
    tensors = {"x": torch.tensor([torch.nan, torch.inf])}
    assert decode(encode(tensors))[0]["x"].isnan().tolist() == [True, False]
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        with pytest.raises(Malformed, match="finite"):
            decode(encode({"x": tensors["x"].to(dtype)}), finite=True)
    with pytest.raises(Malformed, match="complex64"):
        decode(save({"x": torch.zeros(2, dtype=torch.complex64)}, {"header": "{}"}))


def test_an_answer_that_was_damaged_is_always_refused():
    """The answer is cut short, of another shape, with NaN, or random bytes of the same length."""
    rng = np.random.default_rng(0)
    for tensor in (torch.zeros(2, 3), torch.arange(3), torch.zeros(0)):
        answer = encode({"value": tensor}, {"asked": 1})
        damaged = [answer[:n] for n in range(len(answer))] + [rng.bytes(len(answer)) for _ in range(50)]
        damaged.append(encode({"value": torch.cat([tensor.flatten(), tensor.new_zeros(1)])}, {"asked": 1}))
        if tensor.is_floating_point() and tensor.numel():
            damaged.append(encode({"value": torch.full_like(tensor, torch.nan)}, {"asked": 1}))
        decode(answer, {"value": (tensor.dtype, tuple(tensor.shape))}, finite=True)
        for each in damaged:
            with pytest.raises(Malformed):
                decode(each, {"value": (tensor.dtype, tuple(tensor.shape))}, finite=True)
