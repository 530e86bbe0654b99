"""From Medusa heads on disk, or in training, to a drafter that the engine runs."""

import warnings

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.checkpoints.source import Checkpoint
from jspec.drafters.medusa import Medusa, MedusaHeads
from jspec.drafters.medusa_facts import target_ids
from jspec.drafters.medusa_formats import StoredHeads, read_heads
from jspec.targets.target import Target


def read_medusa(checkpoint: Checkpoint, form: str, target: Target) -> Medusa:
    """The drafter in a checkpoint.

    Heads that were trained together with their model (Medusa-2) are of little use to another one;
    where the model stands beside them and is not the target, a warning says so.

    Args:
        checkpoint: with config.json.
        form: from `medusa_formats.recognise`.
        target: what it drafts for.

    Raises:
        ValueError, NotImplementedError: see `read_heads`.
    """
    heads = read_heads(checkpoint, form, target.config)
    norm = "model.norm.weight"
    if norm in checkpoint.names():
        ours = dict(nnx.to_flat_state(target.params))[("norm", "weight")][...]
        theirs = checkpoint.read(norm)
        if theirs.shape != ours.shape or not jnp.array_equal(ours, jnp.asarray(theirs, ours.dtype)):
            warnings.warn(
                f"the model beside the Medusa heads in {checkpoint.path} is not {target.name}; "
                "heads trained with their model need it: load that folder as the target.",
                stacklevel=2,
            )
    return build_medusa(heads, target)


def build_medusa(heads: StoredHeads, target: Target) -> Medusa:
    """The drafter of a set of heads, in the target's dtype.

    A projection that is the target's, by definition or bit for bit, is the target's own array.

    Args:
        heads: from `read_heads`, or out of training.
        target: what they draft for.

    Raises:
        ValueError: heads of another width or vocabulary.
    """
    config = heads.config
    ids = target_ids(heads.name, heads.tensors, config.vocab_size)
    abstract = nnx.eval_shape(lambda: MedusaHeads(config, dtype=target.dtype))
    graphdef, shapes = nnx.split(abstract)
    flat = []
    for path, variable in nnx.to_flat_state(shapes):
        array = _parameter(path, heads, target, ids)
        if array.shape != variable.shape:
            raise ValueError(
                f"{heads.name}: {'.'.join(map(str, path))} has shape {array.shape}, expected "
                f"{variable.shape}; the heads belong to another target than {target.name}."
            )
        flat.append((path, variable.replace(array)))
    return Medusa(
        config=config,
        graphdef=graphdef,
        params=nnx.from_flat_state(flat),
        token_map=None if ids is None else ids.astype(np.int32),
        description=_describe(heads),
        heads=heads,
    )


def target_head(target: Target):
    """The target's output projection, [V, E]: the very array among its parameters."""
    state = dict(nnx.to_flat_state(target.params))
    return state.get(("head",), state[("embedding",)])[...]


def _parameter(path: tuple, heads: StoredHeads, target: Target, ids: np.ndarray | None):
    """The array of one parameter of `MedusaHeads`."""
    if path[0] == "blocks":
        _, head, layer, leaf = path
        return jnp.asarray(heads.tensors[f"blocks.{head}.layers.{layer}.{leaf}"], target.dtype)
    kind = heads.config.projection
    if kind == "target":
        theirs = target_head(target)
        return theirs if ids is None else theirs[jnp.asarray(ids, jnp.int32)]
    stored = heads.tensors["lm_head.weight" if kind == "one" else f"lm_heads.{path[1]}.weight"]
    if ids is not None and len(stored) == heads.config.vocab_size:
        stored = stored[ids]  # as vLLM does with a whole projection beside a map
    array = jnp.asarray(stored, target.dtype)
    if kind == "one":
        theirs = target_head(target)
        if theirs.shape == array.shape and bool(jnp.array_equal(theirs, array)):
            return theirs
    return array


def _describe(heads: StoredHeads) -> str:
    config = heads.config
    shared = {
        "own": "a projection each",
        "one": "one projection for all",
        "target": "the target's projection",
    }
    said = (
        f"Medusa, {config.num_heads} heads of {config.num_layers} residual blocks with "
        f"{shared[config.projection]}"
    )
    if config.draft_vocab_size < config.vocab_size:
        said += f", {config.draft_vocab_size} of {config.vocab_size} tokens"
    return "; ".join((f"{said}, in the format {heads.format}", *heads.remarks))
