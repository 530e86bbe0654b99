"""EAGLE heads in the files of SafeAILab, SpecForge, speculators and ModelOpt: read and written.

| format | first layer | config |
|---|---|---|
| safeailab | `midlayer.` (EAGLE-3), `layers.0.` (EAGLE-1/2) | a Llama config |
| specforge | `midlayer.` | `LlamaForCausalLMEagle3`, `eagle_config` |
| speculators | `layers.0.` | `speculators_model_type`, `transformer_layer_config` |
| modelopt | `layers.0.` | `LlamaForCausalLMEagle3`, `eagle_config` |
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jspec.checkpoints.atomic import new_folder
from jspec.checkpoints.source import Checkpoint
from jspec.drafters.eagle_config import eagle3_config, eagle_config
from jspec.drafters.eagle_published import published, refuse_what_cannot_be_said
from jspec.drafters.heads import Head, target_ids
from jspec.targets.config import TargetConfig

WRITABLE = ("safeailab", "specforge", "speculators")


def recognise(checkpoint: Checkpoint) -> str | None:
    """The format of an EAGLE head, None where it is none.

    Raises:
        NotImplementedError: another method of the speculators format, by name.
    """
    names, config = checkpoint.names(), checkpoint.config
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind != "eagle3":
            raise NotImplementedError(
                f"speculators_model_type={kind!r} is not supported; expected 'eagle3'."
            )
        return "speculators"
    plain = {_canonical(name) for name in names}
    if "fc.weight" not in plain:
        return None
    marked = "LlamaForCausalLMEagle3" in (config.get("architectures") or ())
    if any(name.startswith("midlayer.") for name in map(_unprefixed, names)):
        return "specforge" if marked else "safeailab"
    if "layers.0.hidden_norm.weight" in plain:
        return "modelopt"
    return "safeailab" if "layers.0.self_attn.q_proj.weight" in plain else None


def read_head(checkpoint: Checkpoint, form: str, target: TargetConfig) -> Head:
    """Open a head; tensors are memory-mapped, and nothing is checked against its shapes yet.

    Args:
        checkpoint: with config.json.
        form: from `recognise`.
        target: of the model it drafts for.
    """
    tensors = {}
    for name in sorted(checkpoint.names()):
        canonical = _canonical(name)
        if canonical in tensors:
            raise ValueError(f"{checkpoint.path} holds {canonical!r} twice, once as {name!r}.")
        tensors[canonical] = checkpoint.read(name)
    public = checkpoint.config
    if _is_eagle3(tensors):
        config = eagle3_config(public, tensors, target, form)
    else:
        config = eagle_config(public, tensors, target)
    return Head(
        name=str(checkpoint.path), format=form, config=config, tensors=tensors, published=public
    )


def write_head(
    head: Head,
    path: str | Path,
    to: str,
    *,
    embedding: np.ndarray | None = None,
    verifier: Mapping[str, Any] | None = None,
) -> None:
    """Write a head in a public format; the folder appears whole or not at all.

    Args:
        head: what to write.
        path: a folder that does not exist yet.
        to: one of `WRITABLE`.
        embedding: the target's, written where the head has none of its own (speculators only).
        verifier: the target's `name_or_path` and `architectures` (speculators only).

    Raises:
        ValueError: an unknown format, or a folder that exists.
        NotImplementedError: a switch of the head that the format cannot say, by name.
    """
    if to not in WRITABLE:
        raise ValueError(f"format {to!r} is not known; expected one of {', '.join(WRITABLE)}.")
    tensors = dict(head.tensors)
    refuse_what_cannot_be_said(head, to)
    if head.method == "eagle3":
        ids = target_ids(head)
        if ids is not None:
            full, size = head.config.decoder.vocab_size, len(ids)
            tensors["d2t"] = ids - np.arange(size, dtype=np.int64)
            tensors["t2d"] = np.isin(np.arange(full), ids)
        if to == "speculators" and embedding is not None:
            tensors.setdefault("embed_tokens.weight", embedding)
    config = published(head, to, verifier)
    with new_folder(path) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        named = {_public(name, to, head.method): _own(array) for name, array in tensors.items()}
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def _is_eagle3(tensors: Mapping[str, Any]) -> bool:
    return "layers.0.hidden_norm.weight" in tensors


def _unprefixed(name: str) -> str:
    return name.removeprefix("model.")


def _canonical(name: str) -> str:
    """Our name of a tensor; serving stacks put `model.` before all of them."""
    bare = _unprefixed(name)
    if bare.startswith("midlayer."):
        bare = "layers.0." + bare.removeprefix("midlayer.")
    return bare


def _public(name: str, to: str, method: str) -> str:
    if method == "eagle3" and to in ("safeailab", "specforge"):
        return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
    return name


def _own(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array)
