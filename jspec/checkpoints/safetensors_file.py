"""Memory-mapped safetensors: the header is checked once, each tensor is a view into the file.

Format: 8 bytes little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`,
then the data. Reference: https://huggingface.co/docs/safetensors/index#format. Read here rather
than through the library because its numpy front end copies, and hides what exactly is broken.
"""

import json
import math
import mmap
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

_MAX_HEADER = 100_000_000  # the format's own limit


class TensorInfo(NamedTuple):
    """One header entry: the stored dtype's name, the shape, and where its bytes are in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """One `.safetensors` file, mapped into memory.

    Attributes:
        path: the file.
        infos: every tensor of the header by name.
    """

    def __init__(self, path: Path):
        """Map `path` and check its header against the file's size.

        Raises:
            ValueError: not a safetensors file, truncated, or a header that contradicts itself.
        """
        self.path = path
        size = path.stat().st_size
        if size < 8:
            raise ValueError(
                f"{path} is not a safetensors file: it has {size} bytes, expected at least 8; "
                "download or copy it again"
            )
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._data[:16] == b"version https://":
            raise ValueError(
                f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder"
            )
        self.infos = self._read_header(size)

    def read(self, name: str) -> np.ndarray:
        """A read-only view of tensor `name` in its stored dtype; nothing is copied.

        Raises:
            NotImplementedError: the stored dtype has no numpy counterpart.
        """
        info = self.infos[name]
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            raise NotImplementedError(
                f"{self.path}: tensor {name!r} is stored as {info.dtype}, expected one of "
                f"{', '.join(DTYPES)}; convert the checkpoint to bfloat16 or float32"
            )
        raw = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)
        return raw.view(dtype).reshape(info.shape)

    def _read_header(self, size: int) -> dict[str, TensorInfo]:
        length = int.from_bytes(self._data[:8], "little")
        if length > _MAX_HEADER:
            raise ValueError(
                f"{self.path} is not a safetensors file: its header would be {length} bytes long, "
                f"expected at most {_MAX_HEADER}; download or copy it again"
            )
        start = 8 + length
        if start > size:
            raise ValueError(
                f"{self.path} is truncated: its header ends at byte {start}, the file at {size}; "
                "download or copy it again"
            )
        try:
            header = json.loads(self._data[8:start])
            header.pop("__metadata__", None)
            infos = {name: _tensor_info(entry, start) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{self.path} has a broken safetensors header ({error}); download or copy it again"
            ) from error
        end = max((info.offset + info.nbytes for info in infos.values()), default=start)
        if end != size:
            fault = "is truncated" if end > size else "has bytes that belong to no tensor"
            raise ValueError(
                f"{self.path} {fault}: its header describes {end} bytes, the file has {size}; "
                "download or copy it again"
            )
        for name, info in infos.items():
            dtype = DTYPES.get(info.dtype)
            if dtype is not None and math.prod(info.shape) * dtype.itemsize != info.nbytes:
                raise ValueError(
                    f"{self.path}: tensor {name!r} of shape {info.shape} and dtype {info.dtype} "
                    f"has {info.nbytes} bytes, expected {math.prod(info.shape) * dtype.itemsize}; "
                    "download or copy it again"
                )
        return infos


def _tensor_info(entry: dict, start: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    if not 0 <= begin <= end or any(size < 0 for size in shape):
        raise ValueError(f"offsets {begin}..{end} and shape {list(shape)} cannot be")
    return TensorInfo(str(entry["dtype"]), shape, start + begin, end - begin)
