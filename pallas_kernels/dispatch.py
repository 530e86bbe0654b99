"""Chooses which implementation of an op runs.

    None         "triton" on a CUDA GPU, falling through to "xla" only where the kernel says
                 NotImplementedError; "xla" on every other platform
    "xla"        plain JAX, every platform
    "triton"     the Pallas kernel through Triton; raises where it cannot run
    "interpret"  the same Pallas kernel in interpret mode (slow; any platform; for tests)

The choice is made while tracing, from the default backend, so it costs nothing per call.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.core import Tracer

IMPLEMENTATIONS = ("xla", "triton", "interpret")


def default_is_cuda() -> bool:
    """Whether arrays land on a CUDA GPU unless placed elsewhere."""
    device = getattr(jax.config, "jax_default_device", None)
    if device is None:
        device = jax.devices()[0]
    if isinstance(device, str):
        return device in ("gpu", "cuda")
    # ROCm devices call their platform "gpu" too; only the client's version string tells.
    return device.platform in ("gpu", "cuda") and "rocm" not in device.client.platform_version


def call(
    op: str,
    implementation: str | None,
    table: Mapping[str, Callable[..., Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs `table[implementation](*args, **kwargs)`, or the platform's choice for None.

    Args:
        op: the op's name, for error messages.
        implementation: None or one of `IMPLEMENTATIONS`.
        table: one function per implementation; all take the same arguments.

    Raises:
        ValueError: unknown implementation.
        NotImplementedError: a named implementation that cannot run this call.
    """
    if implementation is None:
        if default_is_cuda():
            try:
                return table["triton"](*args, **kwargs)
            except NotImplementedError:
                pass  # the kernel said it does not cover this call; XLA covers every call
        return table["xla"](*args, **kwargs)
    if implementation not in table:
        raise ValueError(
            f"{op}: got implementation={implementation!r}, expected None or one of "
            f"{', '.join(map(repr, table))}"
        )
    if implementation == "triton" and not default_is_cuda() and not _tracing(args):
        raise NotImplementedError(
            f"{op}: implementation='triton' needs a CUDA GPU, got the "
            f"{jax.default_backend()!r} backend; use 'xla', or 'interpret' to test the kernel here"
        )
    return table[implementation](*args, **kwargs)


def _tracing(args: Any) -> bool:
    # Under jit the call may be lowered for another platform than the one at hand (that is how
    # the kernels are checked without a GPU), so only concrete arrays settle where it will run.
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args))
