"""Draft heads between training and the rest: parameters to train, and back to public tensors."""

from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

from jspec.drafters.eagle import Eagle, EagleConfig
from jspec.drafters.eagle3 import Eagle3, Eagle3Config
from jspec.drafters.eagle_build import build_drafter, head_sources
from jspec.drafters.heads import Head
from jspec.targets import Target

Trained = dict[tuple, Array]
"""Parameters by their path in the module."""


def module_of(config: EagleConfig | Eagle3Config, dtype) -> tuple[nnx.GraphDef, PyTree]:
    """The static half of a head's module, and the shapes of its parameters."""
    if isinstance(config, Eagle3Config):
        return nnx.split(nnx.eval_shape(lambda: Eagle3(config, dtype=dtype)))
    return nnx.split(nnx.eval_shape(lambda: Eagle(config, dtype=dtype)))


def frozen_paths(config: EagleConfig | Eagle3Config) -> frozenset[tuple]:
    """Parameters that are the target's own."""
    own_head = isinstance(config, Eagle3Config)
    return frozenset({("embedding",)} if own_head else {("embedding",), ("head",)})


def split_head(head: Head, target: Target) -> tuple[nnx.GraphDef, Trained, Trained]:
    """Static half, trained and frozen parameters of a head.

    Raises:
        ValueError: tensors that do not fit, see `build_drafter`.
    """
    drafter = build_drafter(head, target)
    fixed = frozen_paths(head.config)
    trained, frozen = {}, {}
    for path, variable in nnx.to_flat_state(drafter.params):
        (frozen if path in fixed else trained)[path] = variable[...]
    return drafter.graphdef, trained, frozen


def merge_head(graphdef: nnx.GraphDef, *parts: Mapping[tuple, Array]):
    """The module over these parameters."""
    whole = {path: nnx.Param(x) for part in parts for path, x in part.items()}
    return nnx.merge(graphdef, nnx.from_flat_state(sorted(whole.items(), key=_order)))


def public_tensors(
    config: EagleConfig | Eagle3Config, params: Mapping[tuple, Array | np.ndarray]
) -> dict[str, np.ndarray]:
    """Parameters under the names of `jspec.drafters.heads`, fused products taken apart."""
    tensors = {}
    for path, array in params.items():
        start = 0
        for name, shape in head_sources(path, array.shape, config):
            tensors[name] = np.asarray(jax.device_get(array[start : start + shape[0]]))
            start += shape[0]
    return tensors


def _order(item: tuple) -> tuple:
    return tuple(map(str, item[0]))
