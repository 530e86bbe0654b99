"""Device time of a call, without the host's dispatch in it.

The call runs many times inside one compiled loop, over several copies of its big operands, so
that neither launches from Python nor a cache that happens to hold the operands is measured.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax


def compiled_loop(
    function: Callable[..., Any], first: Any, rest: Sequence[tuple[Any, ...]]
) -> Callable[..., Any]:
    """`loop(count, first, rest)` runs `function(first, *r)` for every r in rest, count times.

    Args:
        function: what to time.
        first: an operand all calls share; it also chains them, so that they run in order.
        rest: the other operands, one tuple per rotated copy.
    """

    @functools.partial(jax.jit, static_argnums=())
    def loop(count: Any, first: Any, rest: Any) -> Any:
        def body(_: Any, chained: Any) -> Any:
            for operands in rest:
                out = function(chained, *operands)
                # The next call waits for this result without using it.
                chained, _ = lax.optimization_barrier((chained, out))
            return chained

        return lax.fori_loop(0, count, body, first)

    return loop.lower(1, first, list(rest)).compile()


def seconds_per_call(
    loop: Callable[..., Any],
    first: Any,
    rest: Sequence[tuple[Any, ...]],
    *,
    least: float = 0.03,
    repeats: int = 5,
) -> float:
    """Median seconds per call of a `compiled_loop`, each sample at least `least` seconds long."""
    rest = list(rest)

    def sample(count: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(loop(count, first, rest))
        return time.perf_counter() - begin

    sample(1)  # loads the kernels
    once = max(sample(1), 1e-6)
    count = max(1, int(least / once))
    return statistics.median(sample(count) for _ in range(repeats)) / (count * len(rest))
