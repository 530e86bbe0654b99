"""One view of every checkpoint: Hugging Face config and tensor names, whatever the file format.

`open_checkpoint` reads a folder of safetensors or a GGUF file, `open_draft_checkpoint` also the
pickles that most published drafters still are; `StrictReader` makes sure that loading a model uses
every tensor exactly as it is stored: nothing missing, misshapen or left over.
"""

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jspec.checkpoints import fp8
from jspec.checkpoints.folder import StoredTensor, draft_tensors, folder_tensors, read_json
from jspec.checkpoints.gguf_container import GGUFFile
from jspec.checkpoints.gguf_models import gguf_config, gguf_generation_config, gguf_tensors


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint on disk, opened but not read: tensors are loaded one by one, memory-mapped.

    Attributes:
        path: the folder or the GGUF file.
        config: the content of config.json; for GGUF the same keys, derived from its metadata.
        generation_config: the content of generation_config.json, or {}; for GGUF the token ids.
        tensors: every tensor by its Hugging Face name.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, StoredTensor] = dataclasses.field(repr=False)

    def names(self) -> frozenset[str]:
        """The Hugging Face names of all tensors."""
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name`; ValueError naming similar tensors if there is none."""
        return self._tensor(name).shape

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` as stored.

        Safetensors give a read-only view of the file in the stored dtype (bfloat16 and float8 from
        `ml_dtypes`). GGUF gives float32, dequantised, with q/k rows in Hugging Face order.

        Raises:
            ValueError: no such tensor.
            NotImplementedError: a dtype or quantisation that cannot be read.
        """
        return self._tensor(name).load()

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise ValueError(f"{self.path} has no tensor {name!r}; {_similar(name, self.tensors)}")
        return self.tensors[name]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder of safetensors or a GGUF file.

    A folder holds config.json and `model.safetensors`, or `model.safetensors.index.json` with its
    shards, or exactly one other `*.safetensors`. GGUF architectures: llama (also Mistral and
    SmolLM2), qwen2, qwen3.

    Args:
        path: the folder or the `.gguf` file.

    Returns:
        The checkpoint; headers are read and checked, tensor data is not touched.

    Raises:
        ValueError: missing, truncated, corrupt or ambiguous files, or pickled weights.
        NotImplementedError: a GGUF architecture or quantisation that is not supported.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ValueError(
            f"no checkpoint at {path}: expected a folder with config.json and safetensors, "
            "or a .gguf file"
        )
    if path.suffix.lower() == ".gguf":
        return _open_gguf(path)
    raise ValueError(
        f"{path} is neither a folder nor a .gguf file; pass the folder that holds config.json "
        "and the safetensors"
    )


def open_draft_checkpoint(path: str | Path) -> Checkpoint:
    """Open the folder of a drafter: safetensors where there are any, else pickled weights.

    A folder holds config.json and `medusa_lm_head.safetensors`, or safetensors as in
    `open_checkpoint`, or `medusa_lm_head.pt`, `pytorch_model.bin`, `pytorch_model.bin.index.json`
    with its shards, or exactly one other pickle. Pickles are read by torch's weights-only loader.

    Raises:
        ValueError: as `open_checkpoint`, or pickles that cannot be read safely (see `TorchFile`).
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"no drafter at {path}: expected a folder with config.json and weights")
    return _with_config(path, draft_tensors(path))


class StrictReader:
    """Reads a checkpoint tensor by tensor and insists that everything fits and everything is used.

    reader = StrictReader(checkpoint)
    embedding = reader.take("model.embed_tokens.weight", (V, E))
    ...
    reader.finish(ignore=["*.rotary_emb.inv_freq"])
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self._unused = set(checkpoint.names())

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has tensor `name`; asking does not count as use."""
        return name in self.checkpoint.tensors

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Tensor `name`, which must have `shape`; counts as used from now on.

        A float8 weight with block scales comes out as float32, and its scales count as used too.

        Raises:
            ValueError: missing (with similar names) or misshapen (with both shapes).
        """
        shape = tuple(shape)
        if name not in self.checkpoint.tensors:
            raise ValueError(
                f"{self.checkpoint.path} has no tensor {name!r} of shape {shape}, which its config "
                f"asks for; {_similar(name, self._unused or self.checkpoint.tensors)}"
            )
        stored = self.checkpoint.shape(name)
        if stored != shape:
            raise ValueError(
                f"{self.checkpoint.path}: tensor {name!r} has shape {stored}, its config asks for "
                f"{shape}; the config and the weights are not of the same model"
            )
        self._unused.discard(name)
        weight, scales = self.checkpoint.read(name), fp8.scale_name(name)
        scaled = self.checkpoint.config.get("quantization_config") and weight.dtype.itemsize == 1
        if scales not in self.checkpoint.tensors and not scaled:
            return weight
        block = fp8.block_size(self.checkpoint.config)
        grid = fp8.grid(shape, block)
        return fp8.dequantise(weight, self.take(scales, grid), block)

    def finish(self, ignore: Iterable[str] = ()) -> None:
        """Check that every tensor was taken.

        Args:
            ignore: shell patterns of tensors known to be harmless, e.g. "*.rotary_emb.inv_freq".

        Raises:
            ValueError: naming every tensor that was neither taken nor ignored.
        """
        patterns = tuple(ignore)
        left = sorted(
            name
            for name in self._unused
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        )
        if left:
            raise ValueError(
                f"{self.checkpoint.path} has {len(left)} tensors that its config does not explain: "
                f"{', '.join(left)}; the config and the weights are not of the same model"
            )


def _open_folder(path: Path) -> Checkpoint:
    # Weights first: what is wrong with a folder that has neither is that it is not a checkpoint.
    return _with_config(path, folder_tensors(path))


def _with_config(path: Path, tensors: Mapping[str, StoredTensor]) -> Checkpoint:
    config_path = path / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{path} has no config.json; copy it from where the weights came from")
    generation = path / "generation_config.json"
    return Checkpoint(
        path=path,
        config=read_json(config_path),
        generation_config=read_json(generation) if generation.is_file() else {},
        tensors=tensors,
    )


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile(path)
    config = gguf_config(file)
    tensors = {
        name: StoredTensor(shape, dtype, load)
        for name, (shape, dtype, load) in gguf_tensors(file, config).items()
    }
    return Checkpoint(path, config, gguf_generation_config(file), tensors)


def _similar(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.6)
    return f"similar: {', '.join(near)}" if near else "no name is similar"
