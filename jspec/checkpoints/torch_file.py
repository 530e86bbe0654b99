"""Weights that torch pickled (`.bin`, `.pt`, `.pth`), read through its weights-only loader or not.

A pickle can run code when it is read, so nothing is unpickled here: torch's own loader takes
tensors and plain containers only, and where torch is not installed the file is refused with the
command that converts it.
"""

import fnmatch
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np

SUFFIXES = (".bin", ".pt", ".pth")

# What trainers leave beside the weights.
_NOT_WEIGHTS = ("training_args.bin", "optimizer*", "scheduler*", "scaler*", "rng_state*")

_SAFE_SINCE = (2, 6)
"""Before it, the weights-only loader could be made to run code (CVE-2025-32434)."""

# numpy has no such dtypes: their bits are carried over.
_BY_BITS = {
    "torch.bfloat16": ("uint16", np.dtype(ml_dtypes.bfloat16)),
    "torch.float8_e4m3fn": ("uint8", np.dtype(ml_dtypes.float8_e4m3fn)),
    "torch.float8_e5m2": ("uint8", np.dtype(ml_dtypes.float8_e5m2)),
}


def find_pickles(folder: Path) -> list[Path]:
    """The pickled weights of a folder, without what a trainer left beside them."""
    files = (path for suffix in SUFFIXES for path in folder.glob(f"*{suffix}"))
    return sorted(
        path
        for path in files
        if not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _NOT_WEIGHTS)
    )


def conversion_command(pickles: Sequence[Path]) -> str:
    """The shell command that turns pickled weights into safetensors, once.

    Args:
        pickles: one file, or the shards of one folder.
    """
    folder, stem = pickles[0].parent, pickles[0].stem
    single = len(pickles) == 1
    names = f"'{pickles[0]}'" if single else f"*glob.glob('{folder}/pytorch_model*.bin')"
    # A file of another name keeps it, since readers look for it by name.
    target = stem if single and stem != "pytorch_model" else "model"
    return (
        'python -c "import glob, torch; from safetensors.torch import save_file; '
        f"save_file({{k: v.clone().contiguous() for f in [{names}] for k, v in "
        "torch.load(f, 'cpu', weights_only=True).items()}, "
        f"'{folder}/{target}.safetensors')\""
    )


def require_torch(pickles: Sequence[Path]) -> ModuleType:
    """torch, of a version whose weights-only loader is safe.

    Raises:
        ValueError: it is not installed or too old, with what to do.
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            f"{pickles[0]} holds pickled weights, which can run code when read; they are read only "
            "through torch's weights-only loader: pip install 'jspec[torch]', or convert them once "
            f"where torch is installed, with: {conversion_command(pickles)}"
        ) from error
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _SAFE_SINCE:
        raise ValueError(
            f"torch {torch.__version__} cannot read {pickles[0]} safely: its weights-only loader "
            "can be made to run code; install torch 2.6 or newer"
        )
    return torch


class TorchFile:
    """One pickled file, mapped into memory where its container allows it.

    Attributes:
        path: the file.
        shapes: of every tensor by name.
        dtypes: how torch names the stored ones, such as `bfloat16`.
    """

    def __init__(self, path: Path):
        """Read names and shapes.

        Raises:
            ValueError: torch is not installed or too old to be safe, the file is not weights only,
                or it is broken; with the fix.
        """
        self.path = path
        with path.open("rb") as file:
            if file.read(16) == b"version https://":
                raise ValueError(
                    f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its "
                    "folder"
                )
        self._torch = require_torch([path])
        self._tensors = self._load()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.dtypes = {
            name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` in its stored dtype, read-only.

        Raises:
            NotImplementedError: the stored dtype has no numpy counterpart.
        """
        tensor = self._tensors[name].detach()
        if str(tensor.dtype) in _BY_BITS:
            bits, dtype = _BY_BITS[str(tensor.dtype)]
            values = tensor.contiguous().view(getattr(self._torch, bits)).numpy().view(dtype)
        else:
            try:
                values = tensor.numpy()
            except TypeError as error:
                raise NotImplementedError(
                    f"{self.path}: tensor {name!r} is stored as {tensor.dtype}, which numpy does "
                    "not have; convert the checkpoint to bfloat16 or float32"
                ) from error
        values.flags.writeable = False
        return values

    def _load(self) -> dict:
        mapped = zipfile.is_zipfile(self.path)  # files of torch before 1.6 are read whole
        try:
            content = self._torch.load(
                str(self.path), map_location="cpu", weights_only=True, mmap=mapped
            )
        except Exception as error:  # torch lets pickle, zip and its own errors through
            reason = str(error).strip().split("\n", 1)[0]
            raise ValueError(
                f"{self.path} cannot be read as weights only ({reason}); it holds more than "
                "tensors, or is broken: download it again, or save the state dictionary alone"
            ) from error
        if not isinstance(content, dict):
            raise ValueError(
                f"{self.path} holds a {type(content).__name__}, expected a state dictionary: "
                "tensors by name"
            )
        for name, value in content.items():
            if not isinstance(name, str) or not isinstance(value, self._torch.Tensor):
                raise ValueError(
                    f"{self.path}: entry {name!r} is a {type(value).__name__}, expected tensors "
                    "only; save the state dictionary alone"
                )
        return content
