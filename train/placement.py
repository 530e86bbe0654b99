"""Where arrays live: batches split over the devices, weights on each or split as well (FSDP).

One process or several run the same code: every process builds the same batch and hands over the
parts that its own devices hold.
"""

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

AXIS = "data"


def join(coordinator: str | None, processes: int, process: int) -> None:
    """Meet the other processes of a run; nothing to do for one alone.

    Has to come before anything else asks JAX for its devices.

    Args:
        coordinator: HOST:PORT of process 0.
        processes: how many there are.
        process: number of this one.
    """
    if coordinator is not None:
        jax.distributed.initialize(
            coordinator, processes, process, cluster_detection_method="deactivate"
        )


@dataclass(frozen=True)
class Placement:
    """How a run is spread.

    Attributes:
        mesh: of all devices, one axis.
        fsdp: split weights and optimiser state too; they are gathered where they are used.
    """

    mesh: Mesh
    fsdp: bool = False

    @classmethod
    def over(cls, devices: int | None = None, *, fsdp: bool = False) -> "Placement":
        """Over the first `devices` devices, or all of them.

        Raises:
            ValueError: there are fewer.
        """
        every = jax.devices()
        count = len(every) if devices is None else devices
        if not 1 <= count <= len(every):
            raise ValueError(f"devices={count}; expected 1 to {len(every)}, what JAX finds here")
        return cls(Mesh(np.asarray(every[:count]), (AXIS,)), fsdp)

    @property
    def size(self) -> int:
        """Devices."""
        return self.mesh.size

    def batch(self, arrays: PyTree) -> PyTree:
        """Host arrays [B, ...], split over B.

        Raises:
            ValueError: B is not a multiple of the number of devices.
        """

        def put(x):
            if x.shape[0] % self.size:
                raise ValueError(
                    f"a batch of {x.shape[0]} sequences cannot be split over {self.size} devices; "
                    "choose tokens a batch so that tokens / length is a multiple of it"
                )
            sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(put, arrays)

    def everywhere(self, tree: PyTree) -> PyTree:
        """The same on every device."""
        return self._spread(tree, lambda x: PartitionSpec())

    def weights(self, tree: PyTree) -> PyTree:
        """Trained weights and what is as large: on every device, or split with FSDP."""
        return self._spread(tree, self._spec)

    def gathered(self, tree: PyTree) -> PyTree:
        """Split weights as host arrays, on every process."""
        whole = jax.jit(lambda x: x, out_shardings=NamedSharding(self.mesh, PartitionSpec()))
        return jax.tree.map(lambda x: np.asarray(whole(x).addressable_data(0)), tree)

    def _spec(self, x) -> PartitionSpec:
        if not self.fsdp:
            return PartitionSpec()
        fits = [axis for axis, size in enumerate(x.shape) if size % self.size == 0 and size > 1]
        if not fits:
            return PartitionSpec()
        widest = max(fits, key=lambda axis: x.shape[axis])
        return PartitionSpec(*(AXIS if axis == widest else None for axis in range(x.ndim)))

    def _spread(self, tree: PyTree, spec) -> PyTree:
        if self.size == 1 and jax.process_count() == 1:
            return jax.device_put(tree, self.mesh.devices.item())

        def put(x):
            host = np.asarray(x)
            sharding = NamedSharding(self.mesh, spec(x))
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(put, tree)
