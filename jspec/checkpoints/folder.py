"""The tensors of a folder: one safetensors file, shards under an index, or pickles of a drafter."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jspec.checkpoints.safetensors_file import SafetensorsFile
from jspec.checkpoints.torch_file import TorchFile, conversion_command, find_pickles, require_torch


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


def folder_tensors(path: Path) -> dict[str, StoredTensor]:
    """The safetensors of a folder; pickles are refused with the command that converts them.

    The same precedence as transformers: model.safetensors, then its index, then whatever single
    file there is.
    """
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    found = sorted(path.glob("*.safetensors"))
    if single.is_file():
        return _file_tensors(single)
    if index.is_file():
        return _sharded_tensors(index, _file_tensors)
    if found:
        return _file_tensors(_only(found, index))
    pickles = find_pickles(path)
    if pickles:
        raise ValueError(
            f"{path} holds pickled weights ({pickles[0].name}), which can run code when read; "
            f"convert them once with: {conversion_command(pickles)}"
        )
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        raise ValueError(f"{path} holds no safetensors; pass the GGUF file itself: {ggufs[0]}")
    raise ValueError(
        f"{path} holds no weights: expected model.safetensors, {index.name} with its shards, or "
        "one *.safetensors"
    )


def draft_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a drafter's folder: safetensors where there are any, else pickles.

    Medusa heads may lie beside the whole model they were trained with; then their name tells them.
    """
    heads = path / "medusa_lm_head.safetensors"
    if heads.is_file():
        return _file_tensors(heads)
    if any(path.glob("*.safetensors")) and not heads.with_suffix(".pt").is_file():
        return folder_tensors(path)
    index = path / "pytorch_model.bin.index.json"
    found = find_pickles(path)
    for file in (heads.with_suffix(".pt"), path / "pytorch_model.bin"):
        if file in found:
            return _pickle_tensors(file)
    if index.is_file():
        require_torch(found)  # asked here, since the command must convert all shards at once
        return _sharded_tensors(index, _pickle_tensors)
    if found:
        return _pickle_tensors(_only(found, index))
    raise ValueError(
        f"{path} holds no weights: expected *.safetensors, medusa_lm_head.pt, pytorch_model.bin, "
        "or an index with its shards"
    )


def _only(found: list[Path], index: Path) -> Path:
    if len(found) > 1:
        raise ValueError(
            f"{index.parent} holds {len(found)} {found[0].suffix} files "
            f"({', '.join(file.name for file in found[:4])}{', …' if len(found) > 4 else ''}) and "
            f"no {index.name}; add the index, or keep one file"
        )
    return found[0]


def _file_tensors(path: Path) -> dict[str, StoredTensor]:
    file = SafetensorsFile(path)
    return {
        name: StoredTensor(info.shape, info.dtype, lambda name=name: file.read(name))
        for name, info in file.infos.items()
    }


def _pickle_tensors(path: Path) -> dict[str, StoredTensor]:
    file = TorchFile(path)
    return {
        name: StoredTensor(shape, file.dtypes[name], lambda name=name: file.read(name))
        for name, shape in file.shapes.items()
    }


def _sharded_tensors(
    index: Path, open_shard: Callable[[Path], dict[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
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
        shards[file] = open_shard(shard)
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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content
