"""Every implementation of tree attention against a float64 oracle."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    each_fast_implementation,
    each_implementation,
    oracle_attention,
    oracle_build,
    pack_bits,
    random_parents,
    run,
)

import pallas_kernels as pk
from pallas_kernels.tree_attention.heuristic import choose_config, default_config
from pallas_kernels.tree_attention.xla import _LARGE


def sizes(**sizes):
    return sizes


TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 3e-3}


def make(
    seed, *, B, Tq, H, K, D, S, lengths, U=None, Tk=None, dtype="float32", poison=True, reach=None
):
    """Inputs of one call and its oracle's answer; what must not be read is poisoned with NaN.

    With U the values are the keys' first U columns, as for latent attention.
    """
    rng = np.random.default_rng(seed)
    Tk = Tq if Tk is None else Tk

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)

    parent = random_parents(rng, B, Tk, reach=reach)
    _, above, *_ = oracle_build(parent, np.ones((B, Tk), bool))
    above = above[:, Tk - Tq :]  # a frontier is the tree's newest nodes
    lengths = np.asarray(lengths, np.int32)
    k_cache, v_cache = normal(B, S, K, D), normal(B, S, K, D)
    if poison:
        beyond = jnp.asarray(np.arange(S)[None] >= lengths[:, None])[:, :, None, None]
        nan = jnp.asarray(jnp.nan, dtype)
        k_cache, v_cache = (jnp.where(beyond, nan, x) for x in (k_cache, v_cache))
    k_tree, v_tree = normal(B, Tk, K, D), normal(B, Tk, K, D)
    if U is not None:
        v_cache, v_tree = k_cache[..., :U], k_tree[..., :U]
    args = (
        normal(B, Tq, H, D),
        k_cache,
        v_cache,
        jnp.asarray(lengths),
        k_tree,
        v_tree,
        jnp.asarray(pack_bits(above)),
    )
    return args, oracle_attention(*args[:6], above, D**-0.5)


def check(implementation, args, expected, **options):
    out = run(pk.tree_attention, implementation, *args, **options)
    assert out.dtype == args[0].dtype
    assert out.shape == args[0].shape
    error = np.abs(np.asarray(out.astype(jnp.float32), np.float64) - expected).max()
    assert error < TOLERANCE[args[0].dtype.name], error


def config(rows=16, k=32, splits=1):
    return pk.TreeAttentionConfig(block_rows=rows, block_k=k, splits=splits)


EDGES = {
    "plain decoding": (sizes(B=3, Tq=1, H=4, K=4, D=64, S=70, lengths=[70, 1, 0]), config()),
    "empty prefixes": (sizes(B=2, Tq=5, H=4, K=2, D=64, S=32, lengths=[0, 0]), config(splits=2)),
    "full cache": (sizes(B=1, Tq=8, H=4, K=2, D=64, S=64, lengths=[64]), config()),
    "capacity between blocks": (
        sizes(B=3, Tq=6, H=6, K=2, D=64, S=101, lengths=[101, 64, 33]),
        config(splits=3),
    ),
    "capacity below a block": (sizes(B=2, Tq=3, H=2, K=1, D=64, S=5, lengths=[5, 2]), config()),
    "more parts than blocks": (
        sizes(B=2, Tq=4, H=4, K=2, D=64, S=96, lengths=[96, 20]),
        config(splits=7),
    ),
    "chain": (sizes(B=2, Tq=33, H=2, K=2, D=64, S=40, lengths=[40, 9], reach=1), config(rows=64)),
    "128 nodes, rows over the grid": (
        sizes(B=1, Tq=128, H=4, K=2, D=64, S=48, lengths=[37]),
        config(rows=64, splits=2),
    ),
    "groups of 16": (sizes(B=1, Tq=4, H=16, K=1, D=64, S=40, lengths=[33]), config(rows=64)),
    "groups of 7": (sizes(B=1, Tq=5, H=14, K=2, D=64, S=40, lengths=[33]), config(rows=32)),
    "frontier": (sizes(B=2, Tq=4, Tk=40, H=4, K=2, D=64, S=33, lengths=[20, 33]), config()),
    "head dim 80": (sizes(B=2, Tq=6, H=4, K=2, D=80, S=40, lengths=[31, 8]), config(splits=2)),
    "head dim 96": (sizes(B=1, Tq=6, H=4, K=2, D=96, S=40, lengths=[31]), config()),
    "head dim 128": (sizes(B=1, Tq=6, H=4, K=2, D=128, S=40, lengths=[31]), config()),
    "head dim 192": (sizes(B=1, Tq=6, H=4, K=2, D=192, S=40, lengths=[31]), config(splits=2)),
    "head dim 256": (sizes(B=1, Tq=6, H=4, K=2, D=256, S=40, lengths=[31]), config()),
}


@each_fast_implementation
@pytest.mark.parametrize("edge", EDGES)
def test_edges(implementation, edge):
    shape, chosen = EDGES[edge]
    args, expected = make(1, **shape)
    check(implementation, args, expected, config=chosen)


NARROW = {
    "one latent head": sizes(B=3, Tq=7, H=8, K=1, D=40, U=32, S=70, lengths=[70, 33, 0]),
    "DeepSeek-V3's widths": sizes(B=1, Tq=3, H=16, K=1, D=576, U=512, S=40, lengths=[31]),
    "plain decoding": sizes(B=2, Tq=1, H=4, K=1, D=24, U=16, S=20, lengths=[20, 1]),
    "frontier": sizes(B=2, Tq=4, Tk=40, H=4, K=2, D=20, U=12, S=33, lengths=[20, 33]),
    "half precision": sizes(B=2, Tq=9, H=8, K=1, D=40, U=32, S=64, lengths=[64, 41])
    | {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("shape", NARROW)
def test_values_are_the_keys_first_columns(implementation, shape):
    args, expected = make(12, **NARROW[shape])
    out = run(pk.tree_attention, implementation, *args)
    assert out.shape == (*args[0].shape[:3], NARROW[shape]["U"])
    error = np.abs(np.asarray(out.astype(jnp.float32), np.float64) - expected).max()
    assert error < TOLERANCE[args[0].dtype.name], error


def test_kernel_refuses_values_of_another_width():
    args, _ = make(13, B=1, Tq=2, H=2, K=1, D=32, U=16, S=8, lengths=[3])
    with pytest.raises(NotImplementedError, match="values of width 16 beside keys of 32"):
        pk.tree_attention(*args, implementation="interpret")


@each_implementation
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(implementation, dtype):
    shape = sizes(B=2, Tq=9, H=8, K=2, D=64, S=100, lengths=[100, 41], dtype=dtype)
    args, expected = make(2, **shape)
    check(implementation, args, expected, config=config(rows=64, splits=2))


@each_implementation
def test_default_config(implementation):
    args, expected = make(3, B=2, Tq=8, H=8, K=2, D=64, S=1100, lengths=[1100, 513])
    check(implementation, args, expected)


# A few shapes, so that each is compiled once; everything else about a call is drawn at random.
GRID = [
    sizes(B=2, Tq=1, H=8, K=2, D=64, S=130),
    sizes(B=3, Tq=7, H=4, K=4, D=80, S=75),
    sizes(B=1, Tq=20, Tk=50, H=6, K=2, D=96, S=97),
    sizes(B=2, Tq=64, H=2, K=2, D=128, S=64),
]


@each_implementation
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_grid(implementation, data):
    shape = data.draw(st.sampled_from(GRID))
    lengths = data.draw(st.lists(st.integers(0, shape["S"]), min_size=3, max_size=3))
    reach = data.draw(st.sampled_from([None, 1, 4]))
    seed = data.draw(st.integers(0, 2**32 - 1))
    args, expected = make(seed, **shape, lengths=lengths[: shape["B"]], reach=reach)
    check(implementation, args, expected, config=config(rows=32, splits=2))


@pytest.mark.parametrize("slots", [5, 6, 8])
def test_large_caches_go_in_groups_of_slots(slots):
    lengths = [400, 0, 1, 399, 77, 8, 9, 3][:slots]
    args, expected = make(3, B=slots, Tq=2, H=6, K=3, D=64, S=400, lengths=lengths)
    assert args[1].nbytes > _LARGE
    check("xla", args, expected)


@each_implementation
def test_query_that_sees_nothing_yields_zeros(implementation):
    args, _ = make(4, B=2, Tq=4, H=4, K=2, D=64, S=40, lengths=[0, 40])
    args = (*args[:6], jnp.zeros_like(args[6]))
    out = np.asarray(run(pk.tree_attention, implementation, *args, config=config(splits=2)))
    assert (out[0] == 0).all()
    assert np.isfinite(out[1]).all()


@each_implementation
def test_large_logits_stay_finite(implementation):
    args, _ = make(5, B=1, Tq=4, H=2, K=2, D=64, S=40, lengths=[33])
    args = (args[0] * 1e4, *args[1:])
    out = run(pk.tree_attention, implementation, *args, config=config(splits=2))
    assert np.isfinite(np.asarray(out)).all()


@each_implementation
def test_slots_do_not_touch_each_other(implementation):
    shape = sizes(B=2, Tq=5, H=4, K=2, D=64, S=40)
    args, _ = make(6, **shape, lengths=[17, 40])
    other = (*(jnp.asarray(x).at[1].set(jnp.nan) for x in args[:3]), *args[3:])
    clean, spoiled = (
        np.asarray(run(pk.tree_attention, implementation, *a, config=config()))
        for a in (args, other)
    )
    np.testing.assert_array_equal(clean[0], spoiled[0])


def test_bits_beyond_the_tree_are_ignored_by_the_kernel():
    args, expected = make(7, B=1, Tq=5, H=4, K=2, D=64, S=40, lengths=[17])
    args = (*args[:6], args[6] | jnp.uint32(0xFFFFFFE0))
    for implementation in ("xla", "interpret"):
        check(implementation, args, expected, config=config())


def test_scale_is_a_factor_on_the_logits():
    args, _ = make(8, B=1, Tq=5, H=4, K=2, D=64, S=40, lengths=[17])
    twice = run(pk.tree_attention, "xla", *args, scale=0.25)
    halved = run(pk.tree_attention, "xla", args[0] * 0.25 * 8.0, *args[1:])
    np.testing.assert_allclose(twice, halved, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: (a[0][:, :, :3], *a[1:]), "3 query heads do not divide over 2 KV heads"),
        (lambda a: (a[0], a[1][..., :32], *a[2:]), r"k_cache has shape .*, expected \[1, S, K, 64"),
        (lambda a: (*a[:3], a[3].astype(jnp.uint32), *a[4:]), "lengths has dtype uint32"),
        (lambda a: (*a[:6], a[6].astype(jnp.int32)), "ancestors has dtype int32"),
        (lambda a: (*a[:6], jnp.tile(a[6], (1, 1, 2))), "ancestors has shape"),
        (lambda a: (a[0].astype(jnp.bfloat16), *a[1:]), "k_cache has dtype float32, expected bfl"),
        (lambda a: (*a[:4], a[4][:, :2], *a[5:]), "v_tree has shape"),
    ],
)
def test_errors_say_what_is_wrong(change, message):
    args, _ = make(9, B=1, Tq=5, H=4, K=2, D=64, S=40, lengths=[17])
    unchecked = inspect.unwrap(pk.tree_attention)  # under the tests' own type checker
    with pytest.raises(ValueError, match=message):
        unchecked(*change(args))


def test_kernel_refuses_what_it_does_not_cover():
    args, _ = make(10, B=1, Tq=2, H=2, K=2, D=24, S=8, lengths=[3])
    with pytest.raises(NotImplementedError, match="head dim 24"):
        pk.tree_attention(*args, implementation="interpret")


@pytest.mark.parametrize("field", ["block_rows", "block_k", "num_warps", "num_stages", "splits"])
def test_config_refuses_nonsense(field):
    with pytest.raises(ValueError, match=field):
        pk.TreeAttentionConfig(**{"block_rows": 16, field: 0})


def test_heuristic_keeps_its_promises():
    every = itertools.product(
        [1, 8, 64], [1, 4, 16, 128, 512], [64, 2048, 32768], [64, 80, 128, 256]
    )
    for batch, rows, capacity, dim in every:
        shape = sizes(batch=batch, rows=rows, capacity=capacity, kv_heads=8, dim=dim)
        chosen = default_config(**shape, dtype=jnp.bfloat16, processors=132)
        assert chosen.block_rows <= 128
        assert chosen.splits == 1 or capacity // chosen.splits >= 256
        programs = batch * 8 * -(-rows // chosen.block_rows)
        assert programs * (chosen.splits - 1) < 2 * 132  # one part fewer leaves the GPU short
        assert choose_config(**shape, dtype=jnp.bfloat16).block_rows == chosen.block_rows


def test_one_compile_serves_all_lengths():
    traces = []

    def attend(*args):
        traces.append(1)
        return pk.tree_attention(*args, implementation="xla")

    step = jax.jit(attend)
    for lengths in ([0, 3], [7, 40], [40, 40]):
        step(*make(11, B=2, Tq=3, H=4, K=2, D=64, S=40, lengths=lengths)[0])
    assert len(traces) == 1
