"""Norms and weighted sums of the per-record gradients of two-dimensional convolutions, ordinary and transposed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.privacy.gradients.layers import (
    LayerGradient,
    _gram_inner,
    _pieces,
    _single_outer,
    _squares,
    blank,
    scale,
)

# Copying patches costs about as much as multiplying them, so Gram matrices are computed from pixels unless that takes
# more than this many times the multiply-adds.
_PIXELS_OVER_PATCHES = 2.0


class Correlations(LayerGradient):
    """W_i[o, c, u] = Σ_t maps_i[o, t] · image_i[c, stride·t + dilation·u - padding], for both convolutions.

    nn.Conv2d: image = layer input, maps = output gradient. nn.ConvTranspose2d is the adjoint: image = output
    gradient, maps = layer input. With g groups, channels o and c are split in the same way and W_i is block diagonal.
    With K copies of each record, t runs over the positions of K consecutive rows.
    """

    def __init__(
        self,
        layer: nn.Conv2d | nn.ConvTranspose2d,
        image: Tensor,
        maps: Tensor,
        output_gradient: Tensor,
        copies: int = 1,
    ) -> None:
        trains_bias = layer.bias is not None and layer.bias.requires_grad
        of_rows = output_gradient.sum((2, 3)) if trains_bias else None
        super().__init__(layer, of_rows if of_rows is None else of_rows.unflatten(0, (-1, copies)).sum(1))
        self.copies = copies
        self.image, self.maps = image, maps  # [K b, C, H, W], [K b, O, Th, Tw]
        self.kernel, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        self.padding: tuple[int, int] = layer.padding if isinstance(layer.padding, tuple) else (0, 0)  # type: ignore[assignment]
        self.groups = layer.groups
        self.output_gradient = output_gradient

    @classmethod
    def of_convolution(cls, layer: nn.Conv2d, inputs: Tensor, gradients: Tensor, copies: int = 1) -> Correlations:
        """For a convolution with `inputs` [b, C, H, W] and output gradients [b, O, Th, Tw]."""
        if isinstance(layer.padding, str):
            # With padding="same" the end may have one pixel more than the start; pad here as the layer does.
            inputs = F.pad(inputs, layer._reversed_padding_repeated_twice)
        return cls(layer, inputs, gradients, gradients, copies)

    @classmethod
    def of_transposed(
        cls, layer: nn.ConvTranspose2d, inputs: Tensor, gradients: Tensor, copies: int = 1
    ) -> Correlations:
        """For a transposed convolution with `inputs` [b, O, Th, Tw] and output gradients [b, C, H, W]."""
        # With an output_padding of a stride or more, some positions of the image have no input pixel: add zero pixels.
        grid = [
            (gradients.shape[2 + i] + 2 * layer.padding[i] - layer.dilation[i] * (layer.kernel_size[i] - 1) - 1)  # type: ignore[operator]
            // layer.stride[i]
            + 1
            for i in (0, 1)
        ]
        maps = F.pad(inputs, (0, grid[1] - inputs.shape[3], 0, grid[0] - inputs.shape[2]))
        return cls(layer, gradients, maps, gradients, copies)

    def _weight_norms(self) -> tuple[Tensor, Tensor]:
        rows, o, th, tw = self.maps.shape
        c, h, w = self.image.shape[1:]
        b, t, pixels = rows // self.copies, self.copies * th * tw, h * w
        if t == 1:
            # One position: norms of the outer product of patch and map.
            patches = F.unfold(self.image, self.kernel, self.dilation, self.padding, self.stride)
            of_groups = (b * self.groups, -1)
            squared, terms = _single_outer(patches.view(of_groups), self.maps.reshape(of_groups), self._limit)
            return self._over_groups(squared), self._over_groups(terms)
        # Compare the costs of the gradients themselves and of Gram matrices by patches or by pixels.
        taps = self.kernel[0] * self.kernel[1]
        by_patches = t * t * c * taps
        by_pixels = pixels * pixels * c + t * t * taps if self.copies == 1 else by_patches
        if self._keeps_gradients(b, min(by_patches, by_pixels) + t * t * o):
            self.kept = self._form(self.image, self.maps)
            squared = _squares(self.kept)
            return squared, torch.zeros_like(squared)
        pixelwise = by_pixels <= _PIXELS_OVER_PATCHES * by_patches and self.copies == 1
        numbers = t * t + (pixels * pixels if pixelwise else c * taps * t + t * t)
        parts = []
        for piece in _pieces(b, self.groups * numbers):
            image, maps = (self._in_gram(self._by_groups(values, piece)) for values in (self.image, self.maps))
            # image and maps [n g, K, ., ., .]
            flat = maps.transpose(1, 2).reshape(len(maps), -1, t)
            patches = self._gram_by_pixels(image[:, 0], th, tw) if pixelwise else self._gram_by_patches(image)
            inner, terms = _gram_inner(patches, torch.bmm(flat.transpose(1, 2), flat), self._limit)
            parts.append((self._over_groups(inner), self._over_groups(terms)))
        return torch.cat([inner for inner, _ in parts]), torch.cat([terms for _, terms in parts])

    def _over_groups(self, values: Tensor) -> Tensor:
        return values.view(-1, self.groups).sum(1)

    def _by_groups(self, values: Tensor, records: slice) -> Tensor:
        """Rows [K b, g c, h, w] of some of the records as [n g, K, c, h, w]."""
        of_records = values.unflatten(0, (-1, self.copies))[records]
        return of_records.unflatten(2, (self.groups, -1)).transpose(1, 2).flatten(0, 1)

    def _gram_by_patches(self, image: Tensor) -> Tensor:
        """Gram matrices [n, T, T] of the patches of image [n, K, C, H, W]."""
        patches = F.unfold(image.flatten(0, 1), self.kernel, self.dilation, self.padding, self.stride)
        patches = patches.unflatten(0, image.shape[:2]).transpose(1, 2).flatten(2)
        return torch.bmm(patches.transpose(1, 2), patches)

    def _gram_by_pixels(self, image: Tensor, th: int, tw: int) -> Tensor:
        """Gram matrices [n, T, T] of the patches of image [n, C, H, W], without copying patches.

        a_t·a_s is a sum over kernel taps u of products of pixels x[p(t, u)]·x[p(s, u)]. Each product is an entry of
        the H·W x H·W Gram matrix of pixels, and tap u reads a strided block of it. Taps outside the image read
        padding, which is zero. All blocks are views of one shape, which are added whole: inductor makes functions of
        100,000 lines from sums that are written into parts of a tensor.
        """
        n, _, h, w = image.shape
        flat = image.flatten(2)
        pixels = torch.bmm(flat.transpose(1, 2), flat).view(n, h, w, h, w)
        top, left = self.padding
        blocks = F.pad(pixels, (left, left, top, top) * 2) if top or left else pixels
        for axis in (0, 1):
            step, dilation = self.stride[axis], self.dilation[axis]
            span = dilation * (self.kernel[axis] - 1) + 1
            blocks = blocks.unfold(1 + axis, span, step).unfold(3 + axis, span, step)
            blocks = blocks.diagonal(dim1=-2, dim2=-1)[..., ::dilation]
        gram = pixels.new_zeros(n, th, tw, th, tw)
        for row in blocks.unbind(-2):  # blocks [n, Th, Tw, Th, Tw, taps, taps]
            for block in row.unbind(-1):
                gram += block
        return gram.view(n, th * tw, th * tw)

    def _form(self, image: Tensor, maps: Tensor) -> Tensor:
        """Per-record weight gradients [n, *self.layer.weight.shape] of image [K n, C, H, W], maps [K n, O, Th, Tw]."""
        n, c = len(image) // self.copies, image.shape[1]
        formed = image.new_empty(n, *self.layer.weight.shape)
        taps = self.kernel[0] * self.kernel[1]
        numbers = c * taps * maps.shape[2] * maps.shape[3]
        image, maps = (values.unflatten(0, (-1, self.copies)) for values in (image, maps))
        for records in _pieces(n, numbers):
            for copy in range(self.copies):
                patches = F.unfold(image[records, copy], self.kernel, self.dilation, self.padding, self.stride)
                patches = patches.reshape(-1, c // self.groups * taps, patches.shape[2])
                flat_maps = maps[records, copy].reshape(-1, maps.shape[2] // self.groups, patches.shape[2])
                part = torch.bmm(flat_maps, patches.transpose(1, 2)).view(-1, *self.layer.weight.shape)
                if copy == 0:
                    formed[records] = part
                else:
                    formed[records] += part
        return formed

    def _blank(self, keep: Tensor) -> None:
        keep = keep.repeat_interleave(self.copies)
        self.image, self.maps = blank(self.image, keep), blank(self.maps, keep)

    def _weighted_weight_sum(self, factors: Tensor) -> Tensor:
        # The operation that computes the weight gradient in ordinary training, on scaled rows.
        return torch.ops.aten.convolution_backward(
            scale(self.maps, factors.repeat_interleave(self.copies)),
            self.image,
            self.layer.weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0, 0),
            self.groups,
            (False, True, False),
        )[1]

    def in_float64(self, rows: Tensor) -> Correlations:
        image, maps, output_gradient = (
            values.unflatten(0, (-1, self.copies))[rows].flatten(0, 1).double()
            for values in (self.image, self.maps, self.output_gradient)
        )
        return Correlations(self.layer, image, maps, output_gradient, self.copies)

    def per_record(self) -> dict[str, Tensor]:
        gradients = {"weight": self._form(self.image, self.maps)} if self.has_weight else {}
        return gradients if self.bias is None else {**gradients, "bias": self.bias}
