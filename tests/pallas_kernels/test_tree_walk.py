"""Every implementation of the walks against plain Python, and the sampling rule's exactness."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import each_implementation, random_parents, run

import pallas_kernels as pk


def tree(rng, batch, nodes, vocabulary, *, padding=0.2):
    """A random tree with distinct siblings where the vocabulary allows it, and some padding."""
    parent = random_parents(rng, batch, nodes)
    valid = rng.random(parent.shape) >= padding
    valid[:, 0] = True
    links = run(pk.build_tree, "xla", jnp.asarray(parent), jnp.asarray(valid))
    token = rng.integers(0, vocabulary, parent.shape).astype(np.int32)
    return token, links


def oracle_greedy(token, parent, predict, max_path):
    walks = []
    for b in range(len(token)):
        path = [0]
        while len(path) < max_path:
            wanted = predict[b, path[-1]]
            children = [c for c in range(1, token.shape[1]) if parent[b, c] == path[-1]]
            accepted = [c for c in children if token[b, c] == wanted]
            if not accepted:
                break
            path.append(accepted[0])
        length = len(path)
        path += [path[-1]] * (max_path - length)
        walks.append((path, length, predict[b, path[-1]]))
    return [np.array(column) for column in zip(*walks, strict=True)]


@each_implementation
@pytest.mark.parametrize(("nodes", "max_path"), [(1, 3), (40, 5), (128, 9)])
def test_greedy(implementation, nodes, max_path):
    rng = np.random.default_rng(nodes)
    token, links = tree(rng, 6, nodes, 3)  # three tokens: siblings repeat, walks go deep
    predict = rng.integers(0, 3, token.shape).astype(np.int32)
    walk = run(
        pk.greedy_walk,
        implementation,
        jnp.asarray(token),
        links,
        jnp.asarray(predict),
        max_path=max_path,
    )
    path, length, bonus = oracle_greedy(token, np.asarray(links.parent), predict, max_path)
    np.testing.assert_array_equal(walk.path, path)
    np.testing.assert_array_equal(walk.length, length)
    np.testing.assert_array_equal(walk.bonus, bonus)


@each_implementation
def test_padding_is_never_accepted(implementation):
    # Token 0 everywhere and predicted everywhere: only the structure can say no.
    parent = jnp.asarray([[-1, 0, 1, 2]], jnp.int32)
    valid = jnp.asarray([[True, True, False, True]])
    links = run(pk.build_tree, "xla", parent, valid)
    zeros = jnp.zeros((1, 4), jnp.int32)
    walk = run(pk.greedy_walk, implementation, zeros, links, zeros, max_path=4)
    np.testing.assert_array_equal(walk.path, [[0, 1, 1, 1]])
    assert int(walk.length[0]) == 2


def test_links_as_three_arrays_mean_the_same():
    rng = np.random.default_rng(0)
    token, links = tree(rng, 4, 20, 3)
    predict = jnp.asarray(rng.integers(0, 3, token.shape), jnp.int32)
    parts = (links.parent, links.first_child, links.next_sibling)
    token = jnp.asarray(token)
    for a, b in zip(
        run(pk.greedy_walk, "xla", token, links, predict, max_path=5),
        run(pk.greedy_walk, "xla", token, parts, predict, max_path=5),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def oracle_sampling(token, parent, probs, coin, final, max_path, single, acc):
    walks = []
    for b in range(len(token)):
        path, rejected = [0], []
        while len(path) < max_path:
            rejected, total, accepted = [], 0.0, None
            for child in range(1, token.shape[1]):
                if parent[b, child] != path[-1]:
                    continue
                p = probs[b, path[-1], token[b, child]]
                total += p
                if p > 0 and (coin[b, path[-1]] < total / max(acc, 1e-9) or p >= single):
                    accepted = child
                    break
                rejected.append(token[b, child])
            if accepted is None:
                break
            path.append(accepted)
            rejected = []
        residual = np.maximum(np.nan_to_num(probs[b, path[-1]].astype(np.float64)), 0)
        residual[rejected] = 0
        positive = np.flatnonzero(residual > 0)
        hits = positive[np.cumsum(residual)[positive] > final[b] * residual.sum()]
        last = positive[-1] if len(positive) else len(residual) - 1
        length = len(path)
        path += [path[-1]] * (max_path - length)
        walks.append((path, length, hits[0] if len(hits) else last))
    return [np.array(column) for column in zip(*walks, strict=True)]


@each_implementation
@pytest.mark.parametrize(
    ("thresholds", "nodes", "vocabulary", "max_path"),
    [
        ((1.0, 1.0), 20, 7, 5),
        ((0.3, 0.6), 20, 7, 5),
        ((0.0, 0.0), 20, 7, 5),
        ((1.0, 1.0), 1, 5, 3),
        ((1.0, 1.0), 40, 3000, 6),
    ],
)
def test_sampling(implementation, thresholds, nodes, vocabulary, max_path):
    rng = np.random.default_rng(vocabulary)
    token, links = tree(rng, 8, nodes, min(vocabulary, 7))
    probs = rng.dirichlet(np.full(vocabulary, 0.2), token.shape).astype(np.float32)
    probs[probs < 1e-3] = 0
    coin = rng.random(token.shape).astype(np.float32)
    final = rng.random(len(token)).astype(np.float32)
    walk = run(
        pk.sampling_walk,
        implementation,
        jnp.asarray(token),
        links,
        jnp.asarray(probs),
        jnp.asarray(coin),
        jnp.asarray(final),
        max_path=max_path,
        threshold_single=thresholds[0],
        threshold_acc=thresholds[1],
    )
    parent = np.asarray(links.parent)
    path, length, bonus = oracle_sampling(token, parent, probs, coin, final, max_path, *thresholds)
    np.testing.assert_array_equal(walk.path, path)
    np.testing.assert_array_equal(walk.length, length)
    np.testing.assert_array_equal(walk.bonus, bonus)


@each_implementation
def test_sampling_survives_empty_and_broken_distributions(implementation):
    parent = jnp.asarray([[-1, 0, 0]] * 3, jnp.int32)
    links = run(pk.build_tree, "xla", parent, jnp.ones((3, 3), bool))
    probs = np.zeros((3, 3, 5), np.float32)
    probs[1] = np.nan
    probs[2, :, 3] = 1.0  # all mass on one token that no child carries
    walk = run(
        pk.sampling_walk,
        implementation,
        jnp.asarray([[0, 1, 2]] * 3, jnp.int32),
        links,
        jnp.asarray(probs),
        jnp.zeros((3, 3), jnp.float32),  # a coin of exactly 0 must not accept a banned token
        jnp.zeros((3,), jnp.float32),
        max_path=2,
    )
    np.testing.assert_array_equal(walk.length, [1, 1, 1])
    np.testing.assert_array_equal(walk.bonus, [4, 4, 3])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_sampling_is_exact(implementation):
    """The first emitted token's distribution, by an even grid of both uniforms."""
    vocabulary, steps = 5, 200
    p = np.array([0.35, 0.05, 0.3, 0.1, 0.2], np.float32)
    parent = jnp.asarray([[-1, 0, 0]], jnp.int32)
    links = run(pk.build_tree, "xla", parent, jnp.ones((1, 3), bool))
    grid = (np.arange(steps, dtype=np.float32) + 0.5) / steps
    coin, final = (x.ravel() for x in np.meshgrid(grid, grid, indexing="ij"))
    count = len(coin)
    token = jnp.tile(jnp.asarray([[0, 2, 3]], jnp.int32), (count, 1))
    many = pk.TreeLinks(*(jnp.tile(x, (count,) + (1,) * (x.ndim - 1)) for x in links))
    walk = run(
        pk.sampling_walk,
        implementation,
        token,
        many,
        jnp.broadcast_to(jnp.asarray(p), (count, 3, vocabulary)),
        jnp.broadcast_to(jnp.asarray(coin)[:, None], (count, 3)),
        jnp.asarray(final),
        max_path=2,
    )
    accepted = np.asarray(walk.length) > 1
    emitted = np.where(accepted, np.asarray(token)[0][np.asarray(walk.path)[:, 1]], walk.bonus)
    measured = np.bincount(emitted, minlength=vocabulary) / count
    assert np.abs(measured - p).sum() / 2 < 2 / steps


def test_errors_say_what_is_wrong():
    token = jnp.zeros((1, 3), jnp.int32)
    links = run(pk.build_tree, "xla", jnp.asarray([[-1, 0, 0]], jnp.int32), jnp.ones((1, 3), bool))
    greedy, sampling = inspect.unwrap(pk.greedy_walk), inspect.unwrap(pk.sampling_walk)
    with pytest.raises(ValueError, match="max_path is 0"):
        greedy(token, links, token, max_path=0)
    with pytest.raises(ValueError, match="links has 2 parts"):
        greedy(token, (token, token), token, max_path=2)
    with pytest.raises(ValueError, match="predict has dtype float32"):
        greedy(token, links, token.astype(jnp.float32), max_path=2)
    probs, coin = jnp.zeros((1, 3, 4), jnp.float32), jnp.zeros((1, 3), jnp.float32)
    with pytest.raises(ValueError, match=r"threshold_acc is 1\.5"):
        sampling(token, links, probs, coin, coin[:, 0], max_path=2, threshold_acc=1.5)
    with pytest.raises(ValueError, match="target_probs has dtype bfloat16"):
        sampling(token, links, probs.astype(jnp.bfloat16), coin, coin[:, 0], max_path=2)
