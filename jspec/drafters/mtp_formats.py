"""Prediction modules in a target's checkpoint: read from it, and written back beside the model."""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import PyTree
from safetensors.numpy import save_file

from jspec.checkpoints.atomic import new_folder
from jspec.checkpoints.source import Checkpoint, StrictReader, open_checkpoint
from jspec.drafters.base import Drafter
from jspec.drafters.mtp import with_module
from jspec.drafters.mtp_chain import with_modules
from jspec.targets.mtp import (
    FAMILIES,
    MTPFamily,
    module_names,
    module_prefix,
    module_shapes,
    module_sources,
)
from jspec.targets.names import decoder_sources, fill, split
from jspec.targets.target import Target

_BESIDE = ("tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json")


def read_mtp(target: Target, *, family: MTPFamily | None = None) -> Drafter:
    """The drafter of the modules in the target's own checkpoint.

    Args:
        target: loaded from a folder.
        family: how its modules are run; default by the target's family.

    Raises:
        NotImplementedError: a family whose modules are not supported, by name.
        ValueError: a checkpoint without modules, or with modules of which tensors are missing or
            misshapen (all are named), or whose copies of embedding and head are not the target's.
    """
    config = target.config
    family = family or _family(target)
    if target.path is None:
        raise ValueError(
            f"target {target.name!r} was made in memory, and its modules are read from a "
            "checkpoint; load the target from a folder."
        )
    if not config.mtp_layers:
        raise ValueError(
            f"{target.path} has no prediction modules: its config says num_nextn_predict_layers="
            f"{config.mtp_layers}; use another drafter."
        )
    checkpoint = open_checkpoint(target.path)
    modules = _read_modules(checkpoint, target, family)
    if len(modules) == 1:
        return with_module(target, family, modules[0])
    return with_modules(target, family, modules)


def write_with_modules(
    target: Target,
    modules: list[PyTree],
    path: str | Path,
    *,
    public: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of the target with these modules in it; it appears whole or not at all.

    Tensors of a target from disk are copied bit for bit; everything else is written as it is held.

    Args:
        target: the model.
        modules: parameters of an `MTPModule` each.
        path: a folder that does not exist yet.
        public: config.json; default the target's own. The number of modules is put right.

    Raises:
        ValueError: the folder exists, or a target made in memory comes without `public`.
        NotImplementedError: a family without modules, or a float8 target, whose scales would not
            fit modules of another dtype.
    """
    family, count = _family(target), len(modules)
    config = target.config
    if target.path is None and public is None:
        raise ValueError(
            f"target {target.name!r} was made in memory; give `public`, its config.json."
        )
    tensors, own = _model_tensors(target)
    for index, module in enumerate(modules):
        sources = partial(module_sources, config=config, family=family, index=index)
        tensors |= split(module, sources)
        prefix = module_prefix(config, family, index)
        tensors |= {f"{prefix}.{copy}": tensors[name] for copy, name in _copies(target, family)}
    written = dict(own if public is None else public) | {"num_nextn_predict_layers": count}
    with new_folder(path) as folder:
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        named = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
        if target.path is not None:
            for file in (file for pattern in _BESIDE for file in target.path.glob(pattern)):
                shutil.copyfile(file, folder / file.name)


def _model_tensors(target: Target) -> tuple[dict[str, np.ndarray], Mapping[str, Any]]:
    """The target's own tensors and its config.json."""
    if target.path is None:
        return split(target.params, partial(decoder_sources, config=target.config)), {}
    checkpoint = open_checkpoint(target.path)
    if checkpoint.config.get("quantization_config"):
        raise NotImplementedError(
            f"{target.path} is quantised; modules can be written beside unquantised weights only."
        )
    modules = module_names(target.config)
    names = sorted(checkpoint.names() - modules)
    return {name: checkpoint.read(name) for name in names}, checkpoint.config


def _family(target: Target) -> MTPFamily:
    family = FAMILIES.get(target.config.family)
    if family is None:
        raise NotImplementedError(
            f"prediction modules of {target.config.family!r} targets are not supported; expected "
            f"one of {', '.join(FAMILIES)} (Qwen3-Next's and Ernie-4.5's are not either)."
        )
    return family


def _read_modules(checkpoint: Checkpoint, target: Target, family: MTPFamily) -> list[PyTree]:
    config, reader = target.config, StrictReader(checkpoint)
    _, shapes = module_shapes(config, family, target.dtype)
    copies = _copies(target, family)
    optional = {
        f"{module_prefix(config, family, index)}.{copy}"
        for index in range(config.mtp_layers)
        for copy, _ in copies
    }
    missing = sorted(name for name in module_names(config) - optional if name not in reader)
    if missing:
        raise ValueError(
            f"{checkpoint.path}: its config says num_nextn_predict_layers={config.mtp_layers}, but "
            f"{len(missing)} tensors of the modules are missing: {', '.join(missing)}; the "
            "checkpoint was converted without them, or only in part."
        )
    modules = []
    for index in range(config.mtp_layers):
        sources = partial(module_sources, config=config, family=family, index=index)
        modules.append(fill(reader, shapes, sources))
        prefix = module_prefix(config, family, index)
        for copy, name in copies:
            copied = f"{prefix}.{copy}"
            if copied in reader and not _equal(checkpoint, copied, name):
                raise ValueError(
                    f"{checkpoint.path}: {copied!r} differs from {name!r}, which it should repeat; "
                    "a module with an embedding or a head of its own is not supported."
                )
    return modules


def _copies(target: Target, family: MTPFamily) -> list[tuple[str, str]]:
    """Tensors of a module that repeat the target's, with the names of those."""
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if target.config.tie_embeddings else {}
    return [(copy, tied.get(name, name)) for copy, name in family.copies]


def _equal(checkpoint: Checkpoint, name: str, other: str) -> bool:
    return np.array_equal(checkpoint.read(name), checkpoint.read(other))
