"""Everything the kernels need from Pallas' Triton lowering, in one place.

JAX deprecated this lowering in 0.11 and has moved its names before. Kernels import nothing from
Pallas themselves, so another backend, or another spelling, is a change to this file.

What the lowering asks for: every loaded or stored block has a power-of-two size per dimension
(masks cover the rest), at most three grid dimensions, no scratch memory, two-dimensional
products, and loops without stacked inputs or outputs.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton as _triton
except ImportError:  # a JAX without the Triton lowering
    _triton = None

Spec = pl.BlockSpec
program_id = pl.program_id
slice_at = pl.ds
when = pl.when
cdiv = pl.cdiv


def launch(
    kernel: Callable[..., None],
    *operands: jax.Array,
    name: str,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int = 1,
    aliases: Mapping[int, int] | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """One kernel launch over `grid`; `aliases` maps operand numbers to outputs updated in place.

    Raises:
        NotImplementedError: this JAX has no Triton lowering.
    """
    options: dict[str, Any] = {}
    if interpret:
        options["interpret"] = True
    else:
        # Parameters given explicitly also keep JAX 0.10 from choosing its Mosaic lowering.
        options["compiler_params"] = _require().CompilerParams(
            num_warps=num_warps, num_stages=num_stages
        )
    call = pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=list(in_specs),
        out_specs=list(out_specs),
        out_shape=list(out_shape),
        input_output_aliases=dict(aliases or {}),
        **options,
    )
    return list(call(*operands))


def load(ref: Any, *index: Any, mask: Any = None, other: Any = None) -> jax.Array:
    """Reads `ref[index]`; entries outside `mask` are not touched and read as `other`."""
    return _require().load(ref.at[index], mask=mask, other=other)


def store(ref: Any, *index: Any, value: Any, mask: Any = None) -> None:
    """Writes `ref[index] = value` where `mask` holds."""
    _require().store(ref.at[index], value, mask=mask)


def dot(
    a: jax.Array, b: jax.Array, *, transpose_b: bool = False, interpret: bool = False
) -> jax.Array:
    """Product of two matrices with float32 sums.

    float32 operands would by default be rounded to TF32 (10 bits); three TF32 products keep
    nearly all of float32's precision and still run on tensor cores. Interpret mode has no such
    product and uses the exact one.
    """
    precision = None
    if a.dtype == jnp.float32:
        exact = lax.Precision.HIGHEST
        precision = exact if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if transpose_b else 0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()


def power_of_two_parts(n: int, smallest: int = 16) -> tuple[tuple[int, int], ...]:
    """Cuts n into (start, width) parts of power-of-two width: 80 is 64 + 16, 192 is 128 + 64.

    Raises:
        NotImplementedError: n is not a multiple of `smallest`.
    """
    if n % smallest:
        raise NotImplementedError(f"{n} is not a multiple of {smallest}; use implementation='xla'")
    parts, start = [], 0
    while start < n:
        width = 1 << ((n - start).bit_length() - 1)
        parts.append((start, width))
        start += width
    return tuple(parts)


def processors() -> int:
    """Multiprocessors of the GPU at hand; an H100's or H200's 132 where there is none."""
    device = jax.devices()[0]
    return int(getattr(device, "core_count", 0) or 132) if device.platform == "gpu" else 132


def lower_for_cuda(function: Callable[..., Any], *args: Any) -> Any:
    """Lowers `jax.jit(function)(*args)` for CUDA, with or without a GPU at hand.

    Args:
        function: what to lower; it must name its implementations.
        args: arrays or `jax.ShapeDtypeStruct`s.
    """
    with _abstract_gpu():
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


def _abstract_gpu() -> contextlib.AbstractContextManager[Any]:
    # From JAX 0.11 on, lowering for a GPU asks which one; without a GPU it must be told.
    try:
        from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
    except ImportError:
        return contextlib.nullcontext()
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < (0, 11):
        return contextlib.nullcontext()
    return use_abstract_mesh(
        AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    )


def _require() -> Any:
    if _triton is None:
        raise NotImplementedError(
            f"JAX {jax.__version__} has no Triton lowering for Pallas; use implementation='xla'"
        )
    return _triton
