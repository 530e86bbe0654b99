"""Medusa heads in the files of FasterDecoding, vLLM and ModelOpt: read, and written.

| format | block j of head i | its projection |
|---|---|---|
| medusa | `{i}.{j}.linear.weight` | `{i}.{n}.weight`, or none: the target's (legacy, TGI's v2) |
| medusa-2 | the same below `medusa_head.`, beside the whole model | the same |
| modelopt | the same below `medusa_heads.` | the same |
| vllm-medusa | `blocks.{i}.layers.{j}.weight` | `lm_heads.{i}.weight`, or one `lm_head.weight` |

Inside, tensors have vLLM's names. How many heads and layers there are is counted from the tensors:
published configs say 2 heads where the file holds 5.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jspec.checkpoints.atomic import new_folder
from jspec.checkpoints.source import Checkpoint
from jspec.drafters.medusa import MedusaConfig
from jspec.drafters.medusa_facts import heads_config, remarks
from jspec.targets.config import TargetConfig

WRITABLE = ("medusa", "vllm-medusa")

_PREFIX = {"medusa": "", "medusa-2": "medusa_head.", "modelopt": "medusa_heads."}
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_PROJECTION = re.compile(r"(\d+)\.(\d+)\.weight")


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredHeads:
    """A set of heads as a file has it.

    Attributes:
        name: where it came from, for messages.
        format: how it was stored: a key of the table above.
        config: its facts.
        tensors: by vLLM's names, in stored dtype.
        published: the config.json it came with, whose other keys are kept when it is written back.
        remarks: what its config says that its tensors do not.
    """

    name: str
    format: str
    config: MedusaConfig
    tensors: Mapping[str, np.ndarray] = field(repr=False)
    published: Mapping[str, Any] = field(default_factory=dict, repr=False)
    remarks: tuple[str, ...] = ()


def recognise(checkpoint: Checkpoint) -> str | None:
    """The format of a set of Medusa heads, None where it is none."""
    names = checkpoint.names()
    if any(name.removeprefix("medusa_heads.").startswith("blocks.0.") for name in names):
        return "vllm-medusa"
    if checkpoint.config.get("model_type") == "medusa":
        return "vllm-medusa"
    for form in ("medusa-2", "modelopt", "medusa"):
        inner = [
            name.removeprefix(_PREFIX[form]) for name in names if name.startswith(_PREFIX[form])
        ]
        if any(_BLOCK.fullmatch(name) or _PROJECTION.fullmatch(name) for name in inner):
            return form
    return None


def read_heads(checkpoint: Checkpoint, form: str, target: TargetConfig) -> StoredHeads:
    """Open a set of heads; tensors are memory-mapped where the file allows it.

    Args:
        checkpoint: with config.json.
        form: from `recognise`.
        target: of the model they draft for.

    Raises:
        ValueError: tensors that are missing, left over, or of another width or vocabulary (they are
            named).
        NotImplementedError: a switch of the config that is not implemented, by name.
    """
    name, public = str(checkpoint.path), checkpoint.config
    tensors = _vllm_tensors(checkpoint) if form == "vllm-medusa" else _tensors(checkpoint, form)
    config = heads_config(name, tensors, public, target)
    return StoredHeads(
        name=name,
        format=form,
        config=config,
        tensors=tensors,
        published=public,
        remarks=remarks(config, public),
    )


def write_heads(
    heads: StoredHeads, path: str | Path, to: str, *, projection: np.ndarray | None = None
) -> None:
    """Write a set of heads in a public format; the folder appears whole or not at all.

    Args:
        heads: what to write.
        path: a folder that does not exist yet.
        to: one of `WRITABLE`.
        projection: the target's head, which `vllm-medusa` stores for heads without their own.

    Raises:
        ValueError: an unknown format, or a folder that exists.
        NotImplementedError: something of the heads that the format cannot say, by name.
    """
    if to not in WRITABLE:
        raise ValueError(f"format {to!r} is not known; expected one of {', '.join(WRITABLE)}.")
    tensors = dict(heads.tensors)
    _refuse_what_cannot_be_said(heads, to)
    if to == "vllm-medusa" and heads.config.projection == "target":
        if projection is None:
            raise ValueError(
                f"{heads.name} has no projection of its own, and the format {to!r} stores one; "
                "give the target's head as `projection`."
            )
        tensors["lm_head.weight"] = projection
    config = _published(heads, tensors, to)
    file = "model.safetensors" if to == "vllm-medusa" else "medusa_lm_head.safetensors"
    with new_folder(path) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        named = {
            name if to == "vllm-medusa" else _reference_name(name, heads.config.num_layers): array
            for name, array in tensors.items()
        }
        stored = {name: np.ascontiguousarray(array) for name, array in named.items()}
        save_file(stored, folder / file, metadata={"format": "pt"})


def _tensors(checkpoint: Checkpoint, form: str) -> dict[str, np.ndarray]:
    """The heads' tensors by vLLM's names; the model beside them is left alone."""
    prefix = _PREFIX[form]
    tensors, blocks, unknown = {}, {-1}, []
    projections: dict[str, int] = {}
    for name in sorted(checkpoint.names()):
        inner = name.removeprefix(prefix)
        if match := _BLOCK.fullmatch(inner):
            head, layer, leaf = match.groups()
            blocks.add(int(layer))
            tensors[f"blocks.{head}.layers.{layer}.{leaf}"] = checkpoint.read(name)
        elif match := _PROJECTION.fullmatch(inner):
            projections[name] = int(match[2])
            tensors[f"lm_heads.{match[1]}.weight"] = checkpoint.read(name)
        elif name.startswith(prefix):
            unknown.append(name)
    layers = max(blocks) + 1
    unknown += [name for name, place in projections.items() if place != layers]
    if unknown:
        raise ValueError(
            f"{checkpoint.path} has {len(unknown)} tensors that are no part of Medusa heads of "
            f"{layers} residual blocks and a projection: {', '.join(unknown)}."
        )
    return tensors


def _vllm_tensors(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """The heads' tensors; one projection for all is `lm_head.weight`, however it is stored."""
    tensors = {}
    for name in sorted(checkpoint.names()):
        inner = name.removeprefix("medusa_heads.")
        if inner in tensors:
            raise ValueError(f"{checkpoint.path} holds {inner!r} twice, once as {name!r}.")
        tensors[inner] = checkpoint.read(name)
    if checkpoint.config.get("original_lm_head", False):
        if "lm_heads.0.weight" in tensors:
            tensors.setdefault("lm_head.weight", tensors.pop("lm_heads.0.weight"))
    elif not any(name.startswith("lm_head") for name in tensors):
        raise ValueError(
            f"{checkpoint.path} holds no lm_heads, and its config does not say original_lm_head: "
            "true, with which the target's projection is meant; export the heads again."
        )
    return tensors


def _reference_name(name: str, num_layers: int) -> str:
    kind, head, *inside = name.split(".")
    if kind == "lm_heads":
        return f"{head}.{num_layers}.weight"
    return f"{head}.{inside[1]}.linear.{inside[2]}"


def _refuse_what_cannot_be_said(heads: StoredHeads, to: str) -> None:
    config = heads.config
    if to == "vllm-medusa":
        return
    facts = {
        f"a draft vocabulary of {config.draft_vocab_size} tokens": "token_map" in heads.tensors,
        "one projection for all heads": config.projection == "one",
        "residual blocks without a bias": config.num_layers > 0 and not config.bias,
    }
    for fact, holds in facts.items():
        if holds:
            raise NotImplementedError(
                f"{heads.name} has {fact}, which the format {to!r} cannot say; write it as "
                "'vllm-medusa'."
            )


def _published(heads: StoredHeads, tensors: Mapping[str, np.ndarray], to: str) -> dict[str, Any]:
    """config.json in the format `to`; the one it came with, put right, where that is the same."""
    config, came_with = heads.config, dict(heads.published)
    if to == "medusa":
        facts: dict[str, Any] = {
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
        }
        if heads.format == to:
            return came_with | facts
        base = came_with.get("base_model_name_or_path")
        return facts | ({} if base is None else {"base_model_name_or_path": base})
    facts = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "truncated_vocab_size": config.draft_vocab_size,
        "medusa_fc_bias": config.bias,
        "original_lm_head": "lm_head.weight" in tensors,
    }
    if heads.format == to:
        return came_with | facts
    return facts | {"max_paths": 64, "topk": 10, "torch_dtype": _dtype(tensors)}


def _dtype(tensors: Mapping[str, np.ndarray]) -> str:
    return str(next(array for name, array in tensors.items() if name != "token_map").dtype)
