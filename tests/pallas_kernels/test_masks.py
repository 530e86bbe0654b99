"""The mask encodings against a matrix of ancestors, and back."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import oracle_build, pack_bits, random_parents

from pallas_kernels import masks


@pytest.mark.parametrize("nodes", [1, 8, 9, 16, 17, 32, 33, 64, 100])
def test_every_encoding(nodes):
    rng = np.random.default_rng(nodes)
    parent = random_parents(rng, 3, nodes)
    above = oracle_build(parent, np.ones(parent.shape, bool))[1]
    bits = jnp.asarray(pack_bits(above))
    np.testing.assert_array_equal(masks.to_qlen_only(bits), above)
    np.testing.assert_array_equal(masks.from_qlen_only(jnp.asarray(above)), bits)

    lengths = jnp.asarray([5, 0, 11], jnp.int32)
    full = masks.to_full(bits, lengths)
    rows = [
        np.concatenate([np.ones((nodes, int(n)), bool), a], axis=1).ravel()
        for n, a in zip(lengths, above, strict=True)
    ]
    np.testing.assert_array_equal(full, np.concatenate(rows))
    np.testing.assert_array_equal(masks.from_full(full, lengths, nodes), bits)

    if nodes > 32:
        with pytest.raises(NotImplementedError, match="at most 32 nodes"):
            masks.to_packed(bits)
        return
    packed = masks.to_packed(bits)
    width = {1: 8, 8: 8, 9: 16, 16: 16, 17: 32, 32: 32}[nodes]
    assert packed.dtype == f"uint{width}"
    np.testing.assert_array_equal(packed, (above << np.arange(nodes)).sum(-1))
    as_bytes = np.ascontiguousarray(np.asarray(packed)).view(np.uint8).reshape(3, nodes, -1)
    np.testing.assert_array_equal(masks.to_packed_bytes(bits), as_bytes)
    np.testing.assert_array_equal(masks.from_packed_bytes(jnp.asarray(as_bytes)), bits)


def test_refusals():
    bits = jnp.ones((1, 9, 1), jnp.uint32)
    with pytest.raises(ValueError, match="width is 8 for 9 nodes"):
        masks.to_packed(bits, 8)
    with pytest.raises(ValueError, match="full mask has 3 entries, expected 8"):
        masks.from_full(np.ones(3, bool), jnp.asarray([2], jnp.int32), 2)
    hidden = np.array([True, False, True])
    with pytest.raises(ValueError, match="hides prefix columns"):
        masks.from_full(hidden, jnp.asarray([2], jnp.int32), 1)
