"""The GGUF container: metadata, the tensor table and dequantised tensors, memory-mapped.

Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's own
reader builds a numpy array for every string of the vocabulary, seconds where this takes a tenth of
one, and trusts the file's numbers; its dequantisers are used as they are.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VERSIONS = (2, 3)

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class TensorInfo(NamedTuple):
    """One row of the tensor table.

    `shape` is in numpy order, the reverse of the file's. `quantisation` is ggml's name ("Q4_1").
    """

    shape: tuple[int, ...]
    quantisation: str
    offset: int
    nbytes: int


class GGUFFile:
    """A GGUF file mapped into memory.

    Attributes:
        path: the file.
        metadata: every key with its value (numbers, strings, lists).
        tensors: the tensor table by ggml name.
    """

    def __init__(self, path: Path):
        """Parse the header and check the tensor table against the file's size.

        Raises:
            ValueError: not GGUF, truncated or corrupt.
            NotImplementedError: a version or tensor type that cannot be read.
        """
        self.path = path
        with path.open("rb") as file:
            head = file.read(24)
            if len(head) < 24 or head[:4] != b"GGUF":
                hint = "; run `git lfs pull`" if head.startswith(b"version https://") else ""
                raise ValueError(
                    f"{path} is not a GGUF file: it starts with {head[:4]!r}, "
                    f"expected b'GGUF'{hint}"
                )
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        version, n_tensors, n_keys = struct.unpack_from("<IQQ", head, 4)
        if version not in VERSIONS:
            raise NotImplementedError(
                f"{path} is GGUF version {version}, expected {' or '.join(map(str, VERSIONS))} "
                "(little-endian); convert the model again with a current llama.cpp"
            )
        try:
            cursor = _Cursor(self._data, 24)
            self.metadata = cursor.metadata(n_keys)
            rows = cursor.tensor_rows(n_tensors)
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            raise ValueError(
                f"{path} is a truncated or corrupt GGUF file ({error}); download it again"
            ) from error
        self.tensors = self._tensor_table(rows, cursor.position)

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` as float32 in numpy order; float32 tensors are views of the file."""
        info = self.tensors[name]
        return dequantise(self.raw(name), info.quantisation).reshape(info.shape)

    def raw(self, name: str) -> np.ndarray:
        """The bytes of tensor `name`, uint8 [rows, bytes per row]; no block crosses rows."""
        info = self.tensors[name]
        rows = math.prod(info.shape[:-1])
        data = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)
        return data.reshape(rows, info.nbytes // rows)

    def _tensor_table(self, rows: list[tuple], end: int) -> dict[str, TensorInfo]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(
                f"{self.path} has general.alignment {alignment!r}, expected a power of two; "
                "download it again"
            )
        start = -(-end // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in rows:
            try:
                quantisation = GGMLQuantizationType(kind)
            except ValueError:
                raise NotImplementedError(
                    f"{self.path}: tensor {name!r} has ggml type {kind}, which the installed gguf "
                    "package does not know; try `pip install -U gguf`"
                ) from None
            block, block_bytes = GGML_QUANT_SIZES[quantisation]
            nbytes = math.prod(shape) // block * block_bytes
            if name in tensors or not shape or 0 in shape or shape[-1] % block:
                raise ValueError(
                    f"{self.path} is corrupt: tensor {name!r} of shape {shape} as "
                    f"{quantisation.name} is repeated or cannot exist; download it again"
                )
            if start + offset + nbytes > len(self._data):
                raise ValueError(
                    f"{self.path} is truncated: tensor {name!r} ends at byte "
                    f"{start + offset + nbytes}, the file at {len(self._data)}; download it again"
                )
            tensors[name] = TensorInfo(shape, quantisation.name, start + offset, nbytes)
        return tensors


def dequantise(rows: np.ndarray, quantisation: str) -> np.ndarray:
    """uint8 [rows, bytes per row] as float32 [rows, columns].

    Raises:
        NotImplementedError: a quantisation the `gguf` package cannot undo.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        values = dequantize(rows, GGMLQuantizationType[quantisation])
    except (NotImplementedError, KeyError) as error:
        raise NotImplementedError(
            f"GGUF quantisation {quantisation} cannot be read; expected F32, F16, BF16, Q4_0, "
            "Q4_1, Q5_0, Q5_1, Q8_0 or a K-quant: take another file of the same model"
        ) from error
    return values.astype(np.float32, copy=False)


class _Cursor:
    """Reads the header front to back; the buffer's bounds are checked by `struct` and slicing."""

    def __init__(self, data: mmap.mmap, position: int):
        self.data, self.position = data, position

    def metadata(self, count: int) -> dict[str, Any]:
        self._plausible(count, 13)
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            if key in metadata:
                raise ValueError(f"key {key!r} appears twice")
            metadata[key] = self._value(self._scalar("<I"))
        return metadata

    def tensor_rows(self, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
        self._plausible(count, 32)
        rows = []
        for _ in range(count):
            name = self._string()
            dimensions = self._scalar("<I")
            if dimensions > 4:
                raise ValueError(f"tensor {name!r} has {dimensions} dimensions, expected at most 4")
            shape = self._scalars("Q", dimensions)
            rows.append((name, tuple(reversed(shape)), self._scalar("<I"), self._scalar("<Q")))
        return rows

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"metadata of unknown type {kind} at byte {self.position}")
        element, count = self._scalar("<I"), self._scalar("<Q")
        self._plausible(count, 1)
        if element in _SCALARS:
            return self._scalars(_SCALARS[element][1], count)
        if element == _STRING:
            return self._strings(count)
        return [self._value(element) for _ in range(count)]

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.position)
        self.position += struct.calcsize(form)
        return value

    def _scalars(self, letter: str, count: int) -> list:
        form = f"<{count}{letter}"
        values = struct.unpack_from(form, self.data, self.position)
        self.position += struct.calcsize(form)
        return list(values)

    def _string(self) -> str:
        length = self._scalar("<Q")
        self._plausible(length, 1)
        begin, self.position = self.position, self.position + length
        return self.data[begin : self.position].decode("utf-8")

    def _strings(self, count: int) -> list[str]:
        # A vocabulary is most of the header's work, so this loop makes no calls of its own.
        data, position, strings = self.data, self.position, []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            (length,) = length_at(data, position)
            begin, position = position + 8, position + 8 + length
            if position > len(data):
                raise ValueError(f"a string at byte {begin} does not fit into the file")
            strings.append(data[begin:position].decode("utf-8"))
        self.position = position
        return strings

    def _plausible(self, count: int, size: int) -> None:
        # Before believing a count: a corrupt one must not become an endless loop or a huge list.
        if count * size > len(self.data) - self.position:
            raise ValueError(f"{count} items at byte {self.position} do not fit into the file")
