"""Random trees, float64 oracles in plain numpy, and how each implementation is called."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import dispatch
from pallas_kernels.commit_path.reference import commit_path_reference
from pallas_kernels.tree_attention.reference import tree_attention_reference
from pallas_kernels.tree_build.reference import build_tree_reference, select_links_reference
from pallas_kernels.tree_walk.reference import greedy_walk_reference, sampling_walk_reference

# The shared tests run all of these; "triton" is the compiled kernel and needs a CUDA GPU.
IMPLEMENTATIONS = ["reference", "xla", "interpret", "triton"]
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
# Where many shapes have to be compiled, the reference is left out: it is tested elsewhere.
each_fast_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])


def _attention_reference(*args, scale=None, config=None):
    del config
    return tree_attention_reference(*args, scale=scale or args[0].shape[-1] ** -0.5)


def _build_from_selection_reference(selected, parents, topk):
    parent, valid = select_links_reference(selected, parents, topk=topk)
    return parent, valid, build_tree_reference(parent, valid)


def _split(links):
    if isinstance(links, pk.TreeLinks):
        return links.parent, links.first_child, links.next_sibling
    return links


def _greedy_reference(token, links, predict, *, max_path):
    return greedy_walk_reference(token, *_split(links), predict, max_path=max_path)


def _sampling_reference(
    token, links, probs, uniform, final, *, max_path, threshold_single=1.0, threshold_acc=1.0
):
    return sampling_walk_reference(
        token,
        *_split(links),
        probs,
        uniform,
        final,
        max_path=max_path,
        threshold_single=threshold_single,
        threshold_acc=max(threshold_acc, 1e-9),
    )


REFERENCES = {
    pk.tree_attention: _attention_reference,
    pk.build_tree: build_tree_reference,
    pk.build_tree_from_selection: _build_from_selection_reference,
    pk.greedy_walk: _greedy_reference,
    pk.sampling_walk: _sampling_reference,
    pk.commit_path: commit_path_reference,
}


@functools.cache
def _jitted(op, implementation, options):
    fixed = dict(options)
    static = ("topk",) if op is pk.build_tree_from_selection else ()
    if implementation == "reference":
        return jax.jit(functools.partial(REFERENCES[op], **fixed), static_argnames=static)
    bound = functools.partial(op, implementation=implementation, **fixed)
    return jax.jit(bound, static_argnames=static)


def run(op, implementation, *args, **options):
    """`op` by one implementation, jitted; options must be hashable."""
    if implementation == "triton" and not dispatch.default_is_cuda():
        pytest.skip("the compiled kernels need a CUDA GPU")
    return _jitted(op, implementation, tuple(sorted(options.items())))(*args)


def random_parents(rng, batch, nodes, *, reach=None):
    """Parents of random trees; `reach` bounds how far back a parent lies (1 is a chain)."""
    parent = np.full((batch, nodes), -1, np.int32)
    for node in range(1, nodes):
        low = 0 if reach is None else max(0, node - reach)
        parent[:, node] = rng.integers(low, node, batch)
    return parent


def oracle_build(parent, valid):
    """Depth, ancestor matrix, links and liveness, by walking every node up to the root."""
    batch, nodes = parent.shape
    depth = np.zeros((batch, nodes), np.int64)
    above = np.zeros((batch, nodes, nodes), bool)
    first = np.full((batch, nodes), -1)
    following = np.full((batch, nodes), -1)
    alive = np.zeros((batch, nodes), bool)
    for b in range(batch):
        for node in range(nodes):
            chain = [node]
            while chain[-1] != 0:
                current = chain[-1]
                up = int(parent[b, current])
                if not valid[b, current] or not 0 <= up < current:
                    break
                chain.append(up)
            alive[b, node] = chain[-1] == 0
            chain = chain if alive[b, node] else [node]
            depth[b, node] = len(chain) - 1
            above[b, node, chain] = True
        for node in range(nodes):
            children = [c for c in range(1, nodes) if alive[b, c] and parent[b, c] == node]
            if children:
                first[b, node] = children[0]
            for elder, younger in itertools.pairwise(children):
                following[b, elder] = younger
    return depth, above, first, following, alive


def pack_bits(above):
    """[..., T] bool to [..., W] uint32, bit j of word j // 32 first."""
    *lead, nodes = above.shape
    words = -(-nodes // 32)
    bits = np.zeros((*lead, words * 32), np.uint64)
    bits[..., :nodes] = above
    bits = bits.reshape(*lead, words, 32) << np.arange(32, dtype=np.uint64)
    return bits.sum(-1).astype(np.uint32)


def oracle_attention(q, k_cache, v_cache, lengths, k_tree, v_tree, above, scale):
    """Float64 attention, one query and one head at a time over exactly the visible columns."""
    q, k_cache, v_cache, k_tree, v_tree = (
        np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k_cache, v_cache, k_tree, v_tree)
    )
    batch, queries, heads, _ = q.shape
    groups = heads // k_cache.shape[2]
    out = np.zeros((*q.shape[:3], v_cache.shape[3]))
    for b in range(batch):
        length = int(lengths[b])
        for head in range(heads):
            kv = head // groups
            keys = np.concatenate([k_cache[b, :length, kv], k_tree[b, :, kv]])
            values = np.concatenate([v_cache[b, :length, kv], v_tree[b, :, kv]])
            for i in range(queries):
                seen = np.concatenate([np.ones(length, bool), above[b, i]])
                if not seen.any():
                    continue
                logits = keys[seen] @ q[b, i, head] * scale
                weights = np.exp(logits - logits.max())
                out[b, i, head] = weights @ values[seen] / weights.sum()
    return out
