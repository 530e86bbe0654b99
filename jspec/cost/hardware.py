"""What a device can do: bytes a second, operations a second, bytes of memory.

The figures of named devices are the peaks of their makers' datasheets, dense (without structured
sparsity). No kernel reaches them, so times that follow from them are lower bounds; ratios of two
memory-bound times do not depend on them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

DTYPES = {"float8": 1, "bfloat16": 2, "float32": 4}
"""Bytes of a number, by the dtype it is stored and multiplied in."""

THIS_MACHINE = "this-machine"
"""The name under which `find_hardware` measures."""


def number_bytes(dtype: str) -> int:
    """Bytes of a number.

    Raises:
        ValueError: not one of `DTYPES`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}; expected {', '.join(DTYPES)}.")
    return DTYPES[dtype]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device, or several that share a model.

    Attributes:
        name: as `find_hardware` knows it.
        bandwidth: W, bytes a second between memory and arithmetic units.
        memory: bytes.
        bfloat16, float8, float32: operations a second (a multiply-add is two) of matrix products in
            that dtype; None where the source gives none. float32 means full precision, not TF32.
        source: the document that the figures are from, or how they were measured.
    """

    name: str
    bandwidth: float
    memory: float
    bfloat16: float | None = None
    float8: float | None = None
    float32: float | None = None
    source: str

    def peak(self, dtype: str) -> float:
        """Operations a second in `dtype`.

        Raises:
            ValueError: no such dtype, or no figure for it here.
        """
        number_bytes(dtype)  # refuses what is not one
        found = getattr(self, dtype)
        if found is None:
            known = ", ".join(name for name in DTYPES if getattr(self, name) is not None)
            raise ValueError(
                f"{self.name} has no {dtype} figure ({self.source}); expected {known}."
            )
        return found

    def ridge(self, dtype: str = "bfloat16") -> float:
        """I* = peak / W, operations a byte: below it a pass is memory-bound, above compute-bound.

        Williams et al. 2009, Roofline, https://doi.org/10.1145/1498765.1498785.
        """
        return self.peak(dtype) / self.bandwidth

    def times(self, devices: int) -> "Hardware":
        """This many of them with one model split evenly.

        Assumes that communication costs nothing, so it is the best case of tensor parallelism.

        Raises:
            ValueError: devices below 1.
        """
        if devices < 1:
            raise ValueError(f"devices={devices}; expected at least 1.")
        if devices == 1:
            return self

        def scaled(figure: float | None) -> float | None:
            return None if figure is None else devices * figure

        return replace(
            self,
            name=f"{devices} x {self.name}",
            bandwidth=devices * self.bandwidth,
            memory=devices * self.memory,
            bfloat16=scaled(self.bfloat16),
            float8=scaled(self.float8),
            float32=scaled(self.float32),
        )


HARDWARE = {
    one.name: one
    for one in (
        Hardware(
            name="a100",
            bandwidth=2.039e12,
            memory=80e9,
            bfloat16=312e12,
            float32=19.5e12,
            source="NVIDIA A100 Tensor Core GPU datasheet, A100 80GB SXM",
        ),
        Hardware(
            name="h100",
            bandwidth=3.35e12,
            memory=80e9,
            bfloat16=989.4e12,
            float8=1978.9e12,
            float32=66.9e12,
            source="NVIDIA H100 Tensor Core GPU architecture whitepaper, H100 SXM5; bandwidth from "
            "the H100 datasheet",
        ),
        Hardware(
            name="h200",
            bandwidth=4.8e12,
            memory=141e9,
            bfloat16=989.4e12,
            float8=1978.9e12,
            float32=66.9e12,
            source="NVIDIA H200 Tensor Core GPU datasheet, H200 SXM; same chip as the H100 SXM5",
        ),
        Hardware(
            name="b200",
            bandwidth=8e12,
            memory=180e9,
            bfloat16=2.25e15,
            float8=4.5e15,
            float32=75e12,
            source="NVIDIA DGX B200 and HGX B200 datasheets, an eighth of the system, dense",
        ),
        Hardware(
            name="tpu-v5e",
            bandwidth=819e9,
            memory=16e9,
            bfloat16=197e12,
            source="Google Cloud documentation, TPU v5e, a chip",
        ),
        Hardware(
            name="tpu-v5p",
            bandwidth=2.765e12,
            memory=95e9,
            bfloat16=459e12,
            source="Google Cloud documentation, TPU v5p, a chip",
        ),
        Hardware(
            name="tpu-v6e",
            bandwidth=1.64e12,
            memory=32e9,
            bfloat16=918e12,
            source="Google Cloud documentation, TPU v6e, a chip",
        ),
    )
}
"""Devices by name."""


def find_hardware(name: str) -> Hardware:
    """A named device; `this-machine` is measured, see `measure_hardware`.

    Raises:
        ValueError: no such name; the message lists those there are.
    """
    if name == THIS_MACHINE:
        return measure_hardware()
    if name not in HARDWARE:
        raise ValueError(f"hardware {name!r}; expected {', '.join(HARDWARE)} or {THIS_MACHINE}.")
    return HARDWARE[name]


def measure_hardware(*, matrix_bytes: int = 2**28, size: int | None = None) -> Hardware:
    """The first device of this process, measured with the two kinds of product a decoder has.

    Bandwidth: a matrix times one vector, as a pass over one token. Operations: a product of two
    square matrices. Medians of a few runs on the machine as busy as it is; float32 on a CPU,
    bfloat16 on an accelerator. Memory is what the device or, on a CPU, the operating system
    reports.

    Args:
        matrix_bytes: of the matrix; larger than every cache, or the caches are measured.
        size: rows of the square ones; default 1,024 on a CPU, 4,096 on an accelerator.
    """
    import jax
    import jax.numpy as jnp

    on_cpu = jax.default_backend() == "cpu"
    dtype, name = (jnp.float32, "float32") if on_cpu else (jnp.bfloat16, "bfloat16")
    columns = 4096
    rows = max(matrix_bytes // columns // DTYPES[name], 1)
    matrix, vector = jnp.ones((rows, columns), dtype), jnp.ones((columns,), dtype)
    bandwidth = matrix.nbytes / _seconds(jnp.dot, matrix, vector)
    speed = product_speed(size or (1024 if on_cpu else 4096), dtype)
    return Hardware(
        name=THIS_MACHINE,
        bandwidth=bandwidth,
        memory=_memory(),
        **{name: speed},
        source=f"measured on {jax.devices()[0].device_kind}",
    )


def product_speed(size: int = 1024, dtype=None) -> float:
    """Operations a second of a product of two size × size matrices on this machine.

    Args:
        size: rows and columns.
        dtype: default float32.
    """
    import jax.numpy as jnp

    square = jnp.ones((size, size), jnp.float32 if dtype is None else dtype)
    return 2 * size**3 / _seconds(jnp.dot, square, square)


def _seconds(program: Callable, *arguments, runs: int = 5) -> float:
    """Median time of a call, jitted and warmed up."""
    import jax

    jitted = jax.jit(program)
    jax.block_until_ready(jitted(*arguments))
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(jitted(*arguments))
        taken.append(time.perf_counter() - start)
    return median(taken)


def _memory() -> float:
    import os

    import jax

    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
