"""One view of every checkpoint: Hugging Face config and tensor names, whatever the file format.

`open_checkpoint` reads a folder of safetensors or a GGUF file; `StrictReader` makes sure that
loading a model uses every tensor exactly as it is stored: nothing missing, misshapen or left over.
"""

import dataclasses
import difflib
import fnmatch
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jspec.checkpoints.gguf_container import GGUFFile
from jspec.checkpoints.gguf_models import gguf_config, gguf_generation_config, gguf_tensors
from jspec.checkpoints.safetensors_file import SafetensorsFile


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor that has not been read yet.

    Attributes:
        shape: its shape in Hugging Face layout.
        dtype: how the file stores it, for people: "BF16", "Q4_1".
        load: reads it.
    """

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], np.ndarray]


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
        return self.checkpoint.read(name)

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
    tensors = _folder_tensors(path)
    config_path = path / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{path} has no config.json; copy it from where the weights came from")
    generation = path / "generation_config.json"
    return Checkpoint(
        path=path,
        config=_read_json(config_path),
        generation_config=_read_json(generation) if generation.is_file() else {},
        tensors=tensors,
    )


def _folder_tensors(path: Path) -> dict[str, StoredTensor]:
    # The same precedence as transformers: one file, then the index, then whatever single file.
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    found = sorted(path.glob("*.safetensors"))
    if single.is_file():
        return _file_tensors(SafetensorsFile(single))
    if index.is_file():
        return _sharded_tensors(index)
    if len(found) == 1:
        return _file_tensors(SafetensorsFile(found[0]))
    if found:
        raise ValueError(
            f"{path} holds {len(found)} safetensors files ({', '.join(f.name for f in found[:4])}"
            f"{', …' if len(found) > 4 else ''}) and no {index.name}; add the index, or keep one "
            "file"
        )
    pickles = sorted((*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")))
    if pickles:
        names = (
            f"'{pickles[0]}'" if len(pickles) == 1 else f"*glob.glob('{path}/pytorch_model*.bin')"
        )
        raise ValueError(
            f"{path} holds pickled weights ({pickles[0].name}), which can run code when read; "
            'convert them once with: python -c "import glob, torch; from safetensors.torch import '
            "save_file; save_file({k: v.clone().contiguous() for f in "
            f"[{names}] for k, v in torch.load(f, 'cpu', weights_only=True).items()}}, "
            f"'{path}/model.safetensors')\""
        )
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        raise ValueError(f"{path} holds no safetensors; pass the GGUF file itself: {ggufs[0]}")
    raise ValueError(
        f"{path} holds no weights: expected model.safetensors, {index.name} with its shards, or "
        "one *.safetensors"
    )


def _file_tensors(file: SafetensorsFile) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(info.shape, info.dtype, lambda name=name: file.read(name))
        for name, info in file.infos.items()
    }


def _sharded_tensors(index: Path) -> dict[str, StoredTensor]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in weight_map.values()
    ):
        raise ValueError(
            f'{index} has no usable "weight_map": expected tensor names with file names of the '
            "same folder; download it again"
        )
    shards: dict[str, dict[str, StoredTensor]] = {}
    for file in sorted(set(weight_map.values())):
        shard = index.parent / file
        if not shard.is_file():
            raise ValueError(
                f"{index} names the shard {file}, which is not in {index.parent}; download it too"
            )
        shards[file] = _file_tensors(SafetensorsFile(shard))
    tensors: dict[str, StoredTensor] = {}
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise ValueError(
                f"{index} places tensor {name!r} in {file}, which does not hold it; "
                "download the index and the shard again"
            )
        tensors[name] = shards[file][name]
    # A tensor the index forgot is still there, so that a strict reader can complain about it.
    for shard in shards.values():
        for name, tensor in shard.items():
            tensors.setdefault(name, tensor)
    return tensors


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile(path)
    config = gguf_config(file)
    tensors = {
        name: StoredTensor(shape, dtype, load)
        for name, (shape, dtype, load) in gguf_tensors(file, config).items()
    }
    return Checkpoint(path, config, gguf_generation_config(file), tensors)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


def _similar(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.6)
    return f"similar: {', '.join(near)}" if near else "no name is similar"
