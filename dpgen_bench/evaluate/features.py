"""Inception features of images: the 2015 network of the FID, as pytorch-fid ported it."""

from __future__ import annotations

import hashlib
import warnings
import zipfile
import zlib
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from pytorch_fid.inception import FID_WEIGHTS_URL, InceptionV3
from torch import Tensor

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import NotMeasured
from dpgen_bench.files import atomic

GET_WEIGHTS = 'python -c "from pytorch_fid.inception import fid_inception_v3; fid_inception_v3()"'


def weights_path() -> Path:
    """Where torch hub keeps the weights (below TORCH_HOME, by default ~/.cache/torch)."""
    return Path(torch.hub.get_dir()) / "checkpoints" / PurePosixPath(FID_WEIGHTS_URL).name


class InceptionFeatures:
    """Images to the 2,048 features of Inception's last pooling layer.

    Grey images are repeated to three channels, pixels divided by 255, and enlarged to 299x299 by the network's own
    bilinear resize. Weights come from torch hub's cache alone: a run never opens the network.

    Raises:
        NotMeasured: if the weights are not in the cache.
        RuntimeError: if they are there and cannot be loaded.
    """

    dim = 2048
    # Raise when features change for other reasons than the weights: caches of the old ones are then left alone.
    revision = "pytorch-fid pool3, bilinear 299, 1"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.path = weights_path()
        self.device = torch.device(device)
        if not self.path.is_file():
            raise NotMeasured(f"weights missing at {self.path}; with a network, get them by\n    {GET_WEIGHTS}")
        try:
            network = InceptionV3([InceptionV3.BLOCK_INDEX_BY_DIM[self.dim]])
        except Exception as error:
            raise RuntimeError(
                f"the weights at {self.path} cannot be loaded ({type(error).__name__}: {error}); delete the file "
                f"and get them anew by\n    {GET_WEIGHTS}"
            ) from error
        # Channels last is 1.4 times as fast on a CPU.
        self.network = network.eval().to(self.device, memory_format=torch.channels_last)

    @cached_property
    def version(self) -> str:
        """Names what the features depend on besides the images: this code's revision and the weights' bytes."""
        with open(self.path, "rb") as file:
            return f"{self.revision}, weights {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"

    @torch.no_grad()
    def __call__(self, images: Tensor, batch_size: int = 64) -> np.ndarray:
        """Features float32 [n, 2048] of uint8 images [n, 1 or 3, h, w]."""
        features = np.empty((len(images), self.dim), dtype=np.float32)
        # TF32 would make the same images give other features on a GPU than on a CPU.
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            for start in range(0, len(images), batch_size):
                batch = images[start : start + batch_size].to(self.device).float().div_(255.0)
                batch = batch.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)
                features[start : start + len(batch)] = self.network(batch)[0].flatten(1).cpu().numpy()
        return features


def cached_features(records: Records, extractor: InceptionFeatures, cache: Path, batch_size: int = 64) -> np.ndarray:
    """Features of a real set, from `cache`/features if they were computed before, else computed and kept there.

    The key is the content of the images and the extractor's version, never a path or a name. A file that cannot be
    read, or holds something else, is reported by a warning and computed anew.
    """
    key = hashlib.sha256(f"{records.images_hash}\n{extractor.version}".encode()).hexdigest()
    path = cache / "features" / f"{key[:32]}.npz"
    if path.exists():
        try:
            with np.load(path, allow_pickle=False) as kept:
                features = kept["features"]
                if str(kept["key"]) == key and features.shape == (len(records), extractor.dim):
                    return features
                problem = "holds other features than its name says"
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            problem = f"cannot be read ({type(error).__name__}: {error})"
        warnings.warn(f"cached features {path} {problem}; computed anew.", stacklevel=2)
    features = extractor(records.images, batch_size)
    with atomic(path) as temporary:
        np.savez(temporary, features=features, key=np.array(key))
    return features
