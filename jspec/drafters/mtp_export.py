"""Writing prediction modules: beside their target's tensors, or alone."""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from safetensors.numpy import save_file

from jspec.checkpoints.atomic import new_folder
from jspec.checkpoints.source import Checkpoint, open_checkpoint
from jspec.drafters.mtp_formats import (
    WRITABLE,
    by_nextn_names,
    by_target_names,
    check_modules,
    copies_in,
    family_of,
    fitting,
    module_tensors,
    recognise,
    refuse_left_over,
    refuse_nextn,
    refuse_none,
)
from jspec.targets.config import TargetConfig, config_from_hf
from jspec.targets.mtp import module_prefix, module_sources
from jspec.targets.names import decoder_sources, split
from jspec.targets.target import Target

_BESIDE = ("tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json")


def export_modules(
    checkpoint: Checkpoint | None, model: Checkpoint, path: str | Path, *, to: str
) -> str:
    """Write modules from disk in another format, tensor by tensor as they are stored.

    Args:
        checkpoint: a folder of modules alone; None for those in the model's own checkpoint.
        model: the checkpoint of their target.
        path: a folder that does not exist yet; it appears whole or not at all.
        to: one of `WRITABLE`.

    Returns:
        The format the modules were found in.

    Raises:
        ValueError: no modules, some that are not whole or another model's, or a folder that exists.
        NotImplementedError: a family without modules, a format that has no word for these, or
            modules quantised in another way than the model they are written beside.
    """
    config = config_from_hf(model.config)
    family = family_of(config)
    if checkpoint is None:
        checkpoint, form = model, "mtp"
        refuse_none(model, config)
    else:
        form = recognise(checkpoint)
        assert form is not None
        checkpoint = by_target_names(checkpoint, form, config)
        config = fitting(checkpoint, config)
        refuse_left_over(checkpoint, config)
    check_modules(checkpoint, model, config, family)
    copies = {copy for copy, _ in copies_in(checkpoint, config, family)}
    names = sorted(module_tensors(checkpoint, config) - copies)
    tensors = {name: checkpoint.read(name) for name in names}
    public, own = checkpoint.config, {}
    if to == "mtp":
        theirs, ours = (c.config.get("quantization_config") for c in (checkpoint, model))
        if theirs != ours:
            raise NotImplementedError(
                f"{checkpoint.path} has quantization_config={theirs}, {model.path} {ours}; a "
                "checkpoint has one for all its tensors: export to mtp-modules instead."
            )
        public = model.config | {"num_nextn_predict_layers": config.mtp_layers}
        own = _own(model)
    _write(config, tensors, path, to, public=public, model=own, folder=model.path)
    return form


def write_mtp(
    target: Target,
    modules: list[PyTree],
    path: str | Path,
    *,
    to: str = "mtp",
    params: PyTree | None = None,
    public: Mapping[str, Any] | None = None,
    dtype: str | None = None,
) -> None:
    """Write modules that are held in memory; the folder appears whole or not at all.

    Tensors of a target from disk are copied bit for bit.

    Args:
        target: the model.
        modules: parameters of an `MTPModule` each.
        path: a folder that does not exist yet.
        to: one of `WRITABLE`.
        params: of the model, where they are no longer those on disk.
        public: config.json; default the target's own. The number of modules is put right.
        dtype: of what is written from memory; default as it is held. The bias that corrects the
            choice of experts stays float32, as it is published.

    Raises:
        ValueError: the folder exists, or a target made in memory comes without `public`.
        NotImplementedError: see `check_writable`.
    """
    config, family = target.config, family_of(target.config)
    made = target.path is None and public is not None
    checkpoint = None if made else check_writable(target, len(modules), to)
    written = dict(public or (checkpoint.config if checkpoint else {}))
    written["num_nextn_predict_layers"] = len(modules)
    if to != "mtp":
        written.pop("quantization_config", None)

    def public_tensors(params: PyTree, sources) -> dict[str, np.ndarray]:
        tensors = split(params, sources)
        return {
            name: rows if dtype is None or name.endswith("_bias") else rows.astype(jnp.dtype(dtype))
            for name, rows in tensors.items()
        }

    tensors = {}
    for index, module in enumerate(modules):
        sources = partial(module_sources, config=config, family=family, index=index)
        tensors |= public_tensors(module, sources)
    model = {}
    if to == "mtp" and params is None and checkpoint is not None:
        model = _own(checkpoint)
    elif to == "mtp":
        whole = target.params if params is None else params
        model = public_tensors(whole, partial(decoder_sources, config=config))
    _write(config, tensors, path, to, public=written, model=model, folder=target.path)


def check_writable(target: Target, count: int, to: str) -> Checkpoint:
    """The checkpoint of a target beside which modules can be written.

    Args:
        target: loaded from a folder.
        count: of modules.
        to: one of `WRITABLE`.

    Raises:
        ValueError: a target made in memory.
        NotImplementedError: a format that has no word for these modules, or a whole checkpoint of a
            quantised target, whose modules would have to be quantised as well.
    """
    if target.path is None:
        raise ValueError(
            f"target {target.name!r} was made in memory; give `public`, its config.json, or load "
            "the target from a folder."
        )
    checkpoint = open_checkpoint(target.path)
    if to == "nextn":
        refuse_nextn(target.config, count)
    if to == "mtp" and checkpoint.config.get("quantization_config"):
        raise NotImplementedError(
            f"{target.name} is quantised, and a checkpoint is so in all its tensors; write "
            "mtp-modules instead."
        )
    return checkpoint


def _own(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """A model's tensors without those of modules."""
    theirs = module_tensors(checkpoint, config_from_hf(checkpoint.config))
    return {name: checkpoint.read(name) for name in sorted(checkpoint.names() - theirs)}


def _write(
    config: TargetConfig,
    tensors: dict[str, np.ndarray],
    path: str | Path,
    to: str,
    *,
    public: Mapping[str, Any],
    model: Mapping[str, np.ndarray],
    folder: Path | None,
) -> None:
    """The folder of a format.

    Args:
        config: of the model.
        tensors: of the modules without copies, by the target's names.
        path: of the new folder.
        to: the format.
        public: config.json of a whole checkpoint.
        model: the model's own tensors, for `mtp`.
        folder: where a tokenizer may lie.
    """
    if to not in WRITABLE:
        raise ValueError(f"format {to!r} is not known; expected one of {', '.join(WRITABLE)}.")
    public = dict(public)
    if to == "nextn":
        refuse_nextn(config, public["num_nextn_predict_layers"])
        public, tensors = by_nextn_names(public, tensors, config)
    elif to == "mtp":
        tensors = {**model, **tensors}
        family, tied = family_of(config), config.tie_embeddings
        for index in range(public["num_nextn_predict_layers"]):
            prefix = module_prefix(config, family, index)
            for copy, name in family.copies:
                name = "model.embed_tokens.weight" if tied else name
                tensors[f"{prefix}.{copy}"] = tensors[name]
    with new_folder(path) as made:
        (made / "config.json").write_text(json.dumps(public, indent=2) + "\n", encoding="utf-8")
        named = {name: np.ascontiguousarray(rows) for name, rows in tensors.items()}
        save_file(named, made / "model.safetensors", metadata={"format": "pt"})
        if folder is not None and to == "mtp":
            for file in (file for pattern in _BESIDE for file in folder.glob(pattern)):
                shutil.copyfile(file, made / file.name)
