"""More than one device: replicas side by side, and weights split within a replica.

A replica has all of the weights and slots of its own. Within one, tensor parallelism splits heads,
MLP and vocabulary over a mesh; XLA puts the communication in. The drafter is replicated: it is
small, and a split would cost more than it saves.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from jspec.engine import Engine
from jspec.engine.state import DecodeState

AXIS = "model"

# Weights are [out, in]: what makes heads, MLP columns or the vocabulary is split along `out`, what
# reads them back along `in`.
_OUT = ("qkv_proj", "gate_up_proj", "embedding", "head")
_IN = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Placement:
    """Weights and cache of one replica over several devices.

    Attributes:
        mesh: its devices, one axis.
    """

    mesh: Mesh

    @property
    def size(self) -> int:
        """Devices."""
        return self.mesh.size

    def weights(self, params: PyTree) -> PyTree:
        """The target's parameters, split."""

        def put(path, leaf):
            return jax.device_put(leaf, self._sharding(leaf, self._axis(path)))

        return jax.tree_util.tree_map_with_path(put, params)

    def everywhere(self, tree: PyTree) -> PyTree:
        """The same arrays on every device."""
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    def put(self, state: DecodeState) -> DecodeState:
        """A state, its cache split by heads."""
        return self._placed(state, jax.device_put)

    def constrain(self, state: DecodeState) -> DecodeState:
        """The same, inside a jitted function."""
        return self._placed(state, jax.lax.with_sharding_constraint)

    def _placed(self, state: DecodeState, place: Any) -> DecodeState:
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        shardings = [
            self._sharding(leaf, 2 if getattr(path[0], "name", None) == "cache" else None)
            for path, leaf in leaves
        ]
        return jax.tree.unflatten(structure, place([leaf for _, leaf in leaves], shardings))

    def _axis(self, path) -> int | None:
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        if any(name in _IN for name in names):
            return 1 if "weight" in names else None
        return 0 if any(name in _OUT for name in names) else None

    def _sharding(self, leaf, axis: int | None) -> NamedSharding:
        if axis is None or leaf.shape[axis] % self.size:
            return NamedSharding(self.mesh, P())
        return NamedSharding(self.mesh, P(*[None] * axis, AXIS))


@dataclass(frozen=True)
class Replica:
    """One copy of the weights.

    Attributes:
        engine: with the weights in their place.
        device: that new arrays are put on.
        placement: over several devices, where the weights are split.
    """

    engine: Engine
    device: Any
    placement: Placement | None = None


def replicate(engine: Engine, *, data_parallel: int = 1, tensor_parallel: int = 1) -> list[Replica]:
    """Copies of an engine over the local devices.

    Args:
        engine: as it was loaded.
        data_parallel: copies.
        tensor_parallel: devices a copy.

    Raises:
        ValueError: too few devices, or heads that cannot be split that often.
        NotImplementedError: a split engine whose kernels are not XLA's.
    """
    devices = jax.local_devices()
    for name, value in (("data_parallel", data_parallel), ("tensor_parallel", tensor_parallel)):
        if value < 1:
            raise ValueError(f"{name}={value}; expected at least 1.")
    needed = data_parallel * tensor_parallel
    if needed > len(devices):
        raise ValueError(
            f"data_parallel={data_parallel} times tensor_parallel={tensor_parallel} needs {needed} "
            f"devices, and JAX finds {len(devices)} here."
        )
    if tensor_parallel > 1:
        _check_split(engine, tensor_parallel)
    groups = [devices[i : i + tensor_parallel] for i in range(0, needed, tensor_parallel)]
    return [_replica(engine, group) for group in groups]


def _replica(engine: Engine, devices: Sequence[Any]) -> Replica:
    if len(devices) == 1 and devices[0] == jax.local_devices()[0]:
        return Replica(engine, devices[0])  # it is there already
    placed = copy.copy(engine)
    target, drafter = engine.params
    if len(devices) == 1:
        moved: dict[int, jax.Array] = {}

        def move(leaf):
            # What drafter and target share stays one array.
            if id(leaf) not in moved:
                moved[id(leaf)] = jax.device_put(leaf, devices[0])
            return moved[id(leaf)]

        placed.params = jax.tree.map(move, engine.params)
        return Replica(placed, devices[0])
    placement = Placement(Mesh(np.asarray(devices), (AXIS,)))
    placed.params = (placement.weights(target), placement.everywhere(drafter))
    return Replica(placed, devices[0], placement)


def _check_split(engine: Engine, count: int) -> None:
    config = engine.target.config
    if engine.round.implementation != "xla":
        raise NotImplementedError(
            "tensor_parallel needs an engine with implementation='xla': the other kernels are not "
            "split over devices yet."
        )
    if config.num_kv_heads % count or config.num_heads % count:
        raise ValueError(
            f"tensor_parallel={count} cannot split {config.num_heads} heads and "
            f"{config.num_kv_heads} key heads of {engine.target.name} evenly; choose a divisor."
        )
