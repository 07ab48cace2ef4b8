"""Inception features of images, as pytorch-fid or the original TensorFlow 1 graph computes them, and their cache.

FID, KID and PRDC are computed from these features, by the Inception network of 2015 with the weights of the FID.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import ClassVar, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext, NotMeasured, hash_images
from dpgen_bench.training.precision import expect_possible
from dpgen_bench.training.progress import ProgressBar
from dpgen_bench.utils.cache import cached_arrays
from dpgen_bench.utils.execution import Precision

GET_WEIGHTS = 'python -c "from pytorch_fid.inception import fid_inception_v3; fid_inception_v3()"'

# Images of one cached file. A killed process loses at most one file, a few minutes of one CPU core.
CHUNK = 1000

# Height and width of the network's input.
SIDE = 299

# The tool whose features are computed; see `InceptionFeatures`.
Tool = Literal["pytorch_fid", "tensorflow1"]


def weights_path() -> Path:
    """Where torch hub keeps the weights (below TORCH_HOME, by default ~/.cache/torch)."""
    from pytorch_fid.inception import FID_WEIGHTS_URL  # imported here because torchvision takes seconds

    return Path(torch.hub.get_dir()) / "checkpoints" / PurePosixPath(FID_WEIGHTS_URL).name


@cache
def weights_hash(path: Path) -> str:
    """SHA-256 of a file of weights, which torch hub never changes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Extractor(Protocol):
    """Computes features float32 [n, dim] of images [n, 1 or 3, h, w], uint8 or float32 within 0..255.

    The features of an image depend on that image only. `version` names all else that they depend on.
    """

    dim: int

    @property
    def version(self) -> str: ...

    def __call__(self, images: Tensor, batch_size: int = 64) -> np.ndarray: ...


def _as_pytorch_fid(pixels: Tensor) -> Tensor:
    resized = nn.functional.interpolate(pixels / 255.0, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    return resized.mul_(2.0).sub_(1.0)


def _as_tensorflow1(pixels: Tensor) -> Tensor:
    return resize_as_tensorflow1(pixels, SIDE).sub_(128.0).div_(128.0)


def resize_as_tensorflow1(images: Tensor, side: int) -> Tensor:
    """Resize images float [n, c, h, w] to [n, c, side, side] as TensorFlow 1's resize_bilinear (align_corners=False).

    Row i of the result is interpolated at row h/side * i of the image. PyTorch and TensorFlow 2 interpolate it at
    h/side * (i + 1/2) - 1/2, so their enlarged image is shifted by up to half a pixel of the original. Interpolation is
    linear between rows and columns, and constant beyond the last one.
    """
    for axis in (3, 2):
        size = images.shape[axis]
        position = torch.arange(side, dtype=torch.float64) * size / side
        before = position.long()
        weight = (position - before).to(images.device, images.dtype).view(-1, *[1] * (3 - axis))
        before, after = (index.to(images.device) for index in (before, (before + 1).clamp(max=size - 1)))
        images = torch.lerp(images.index_select(axis, before), images.index_select(axis, after), weight)
    return images


class InceptionFeatures:
    """Features of images at one of Inception's pooling layers, by default the last one (2,048 features).

    Two tools are in use. They have the same network with the same weights, and differ in how they preprocess images.
    Features are comparable only with features of the same tool: those of 28x28 digits differ by about 16 %.

    - "pytorch_fid": pytorch-fid on a folder of PNG files. Pixels are scaled to x / 127.5 - 1 and enlarged to 299x299 by
      PyTorch's bilinear interpolation.
    - "tensorflow1": the graph in the code of the FID's authors (Heusel et al., 2017), which torch-fidelity reproduces.
      Pixels are enlarged as by TensorFlow 1, see `resize_as_tensorflow1`, and scaled to (x - 128) / 128.

    Both repeat grey images to three channels. Weights are read from torch hub's cache and are never downloaded.

    For speed, batch normalisations are folded into their convolutions, tensors have the memory format channels last,
    and grey images are enlarged before they are repeated. Features differ from the tool's own by rounding (relative
    error near 1e-6).

    Args:
        device: where the network runs.
        dim: 64, 192, 768 or 2,048, as in pytorch-fid and torch-fidelity.
        tool: the tool whose features are computed.
        precision: of the network's products: "fp32" as the tools have, or "tf32" (a GPU) or "bf16", which are faster
            and change features by some percent (docs/protocols.md, "Precision of Inception").

    Raises:
        NotMeasured: if the weights are not in torch hub's cache.
        RuntimeError: if the weights cannot be loaded.
        ValueError: for an unknown tool or precision, and for TF32 on a CPU.
    """

    # For each tool a revision and the preprocessing of pixels. Raise the number at the end of a revision when features
    # change for other reasons than the weights, so that cached features of the previous revision are not used.
    inputs: ClassVar[dict[Tool, tuple[str, Callable[[Tensor], Tensor]]]] = {
        "pytorch_fid": ("pytorch-fid, folded, bilinear 299, 2", _as_pytorch_fid),
        "tensorflow1": ("tensorflow 1, folded, bilinear 299, 1", _as_tensorflow1),
    }

    def __init__(
        self,
        device: torch.device | str = "cpu",
        dim: int = 2048,
        tool: Tool = "pytorch_fid",
        precision: Precision = "fp32",
    ) -> None:
        check_tool(tool)
        check_precision(precision)
        expect_possible(precision, torch.device(device))
        self.precision = precision
        self.revision, self.prepare = self.inputs[tool]
        self.path = weights_path()
        self.device = torch.device(device)
        self.dim = dim
        if not self.path.is_file():
            raise NotMeasured(f"weights missing at {self.path}; with a network, get them by\n    {GET_WEIGHTS}")
        from pytorch_fid.inception import InceptionV3  # imported here because torchvision takes seconds

        try:
            network = InceptionV3([InceptionV3.BLOCK_INDEX_BY_DIM[dim]], resize_input=False, normalize_input=False)
        except Exception as error:
            raise RuntimeError(
                f"the weights at {self.path} cannot be loaded ({type(error).__name__}: {error}); delete the file "
                f"and get them again by\n    {GET_WEIGHTS}"
            ) from error
        network = fold_batch_norms(network.eval())
        self.network = network.to(self.device).to(memory_format=torch.channels_last)

    @cached_property
    def version(self) -> str:
        """Names all that the features depend on besides the images: tool, revision, layer and the weights' content."""
        lower = "" if self.precision == "fp32" else f", {self.precision}"  # caches of float32 features stay valid
        return f"{self.revision}, {self.dim}, weights {weights_hash(self.path)[:16]}{lower}"

    @torch.no_grad()
    def __call__(self, images: Tensor, batch_size: int = 64) -> np.ndarray:
        features = np.empty((len(images), self.dim), dtype=np.float32)
        # With TF32, features on a GPU differ from those on a CPU by more than rounding.
        tf32, bf16 = (self.precision == name for name in ("tf32", "bf16"))
        with (
            torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=tf32),
            torch.autocast(self.device.type, torch.bfloat16, enabled=bf16),
        ):
            for start in range(0, len(images), batch_size):
                batch = self.prepare(images[start : start + batch_size].to(self.device).float()).expand(-1, 3, -1, -1)
                maps = self.network(batch.contiguous(memory_format=torch.channels_last))[0]
                # Layers before the last are averaged over the image, as both tools do.
                features[start : start + len(batch)] = maps.float().mean(dim=(2, 3)).cpu().numpy()
        return features


def check_tool(tool: str) -> None:
    """Check the name of a tool.

    Raises:
        ValueError: for a tool that is not one of `Tool`.
    """
    if tool not in get_args(Tool):
        raise ValueError(f"expected {' or '.join(get_args(Tool))} as the tool of Inception features, got {tool!r}.")


def check_precision(precision: Precision) -> None:
    """Check the name of a precision.

    Raises:
        ValueError: for a precision that is not one of `Precision`.
    """
    if precision not in get_args(Precision):
        raise ValueError(
            f"expected {' or '.join(get_args(Precision))} as the precision of Inception features, got {precision!r}."
        )


def fold_batch_norms(network: nn.Module) -> nn.Module:
    """Replace each pair of `.conv` and `.bn` in a network in evaluation mode by one convolution, in place."""
    for module in network.modules():
        conv, norm = getattr(module, "conv", None), getattr(module, "bn", None)
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            module.conv = fuse_conv_bn_eval(conv, norm)
            module.bn = nn.Identity()
    return network


def features_of(
    records: Records, ctx: EvalContext, *, real: bool, tool: Tool = "pytorch_fid", precision: Precision = "fp32"
) -> np.ndarray:
    """Inception features float32 [n, 2048] of `records`, computed once for all metrics that use the same ones.

    Args:
        records: the images.
        ctx: names the caches, the device and the batch size.
        real: whether the images are real. Features of real images are kept in `ctx.cache` for all runs; features of
            samples are kept in `ctx.scratch` until the run's protocol is complete, so that a killed evaluation can
            resume.
        tool, precision: see `InceptionFeatures`.

    Raises:
        NotMeasured: if the network's weights are not on this machine.
    """
    extractor = _inception(weights_path(), str(torch.device(ctx.device)), tool, precision)
    return cached_features(records, extractor, ctx.cache if real else ctx.scratch, ctx.batch_size)


@lru_cache(maxsize=1)
def _inception(path: Path, device: str, tool: Tool, precision: Precision) -> InceptionFeatures:
    return InceptionFeatures(device, tool=tool, precision=precision)


def cached_features(records: Records, extractor: Extractor, cache: Path | None, batch_size: int = 64) -> np.ndarray:
    """Features float32 [n, dim] of a set, kept in `cache`/features in chunks of `CHUNK` images; see `utils.cache`.

    The key of a chunk is the content of its images and the extractor's version, never a path or a name: sets that
    begin with the same images share their chunks. None as `cache` keeps nothing.
    """
    chunks = records.images.split(CHUNK)
    bar, parts = ProgressBar("features of"), []
    bar.start(f"{len(records)} images", len(chunks))
    for number, images in enumerate(chunks, start=1):
        parts.append(_cached_chunk(images, extractor, cache, batch_size))
        bar.step(number)
    bar.finish()
    return np.concatenate(parts) if parts else np.empty((0, extractor.dim), dtype=np.float32)


def _cached_chunk(images: Tensor, extractor: Extractor, cache: Path | None, batch_size: int) -> np.ndarray:
    arrays = cached_arrays(
        cache and cache / "features",
        f"{hash_images(images)}\n{extractor.version}",
        lambda: {"features": extractor(images, batch_size)},
        lambda kept: kept.keys() == {"features"} and kept["features"].shape == (len(images), extractor.dim),
    )
    return arrays["features"]
