"""Medusa against what FasterDecoding's code computed: logits, trees, walks, whole generations.

Every set with `choices.json` below the golden root is used, whatever it holds.
"""

import functools
import re

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec.checkpoints import open_draft_checkpoint
from jspec.drafters import DraftContext
from jspec.trees import from_choices
from pallas_kernels import greedy_walk

pytestmark = pytest.mark.once

SETS = golden.folders_with("io.npz", "choices.json", "target")
HEADS = [
    (folder, path)
    for folder in SETS
    for path in sorted(folder.iterdir())
    if re.match(r"(medusa|vllm)_", path.name)
]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def recorded_for(folder, pattern):
    """(matches of a pattern, the recorded arrays) of a set."""
    recorded = golden.arrays(folder / "io.npz")
    return [m for m in map(re.compile(pattern).fullmatch, recorded) if m], recorded


@functools.cache
def target_of(folder):
    return jspec.load_target(folder / "target")


@functools.cache
def heads_of(folder, path):
    if not list(path.glob("*.safetensors")):
        pytest.importorskip("torch")
    return jspec.load_drafter(path, target_of(folder), probe=False)


def variant(path):
    return path.name.partition("_")[2]


def logits(drafter, hidden):
    """[B, T, K, V] of every head."""
    module = nnx.merge(drafter.graphdef, drafter.params)
    return jax.jit(lambda x: module(x, drafter.config.num_heads))(jnp.asarray(hidden))


def each_heads(condition):
    """The heads for which the set records what the test compares with."""
    found = [(f, p) for f, p in HEADS if condition(golden.arrays(f / "io.npz"), p)]
    return golden.parametrize("heads", found, "such Medusa heads", lambda x: golden.label(x[1]))


def other_layout(path):
    return path.with_name(path.name.replace("vllm_", "medusa_"))


@each_heads(
    lambda recorded, path: any(
        re.fullmatch(rf"{variant(path)}_p\d+_medusa_logits", key) for key in recorded
    )
)
def test_hidden_states_and_logits(heads):
    folder, path = heads
    found, recorded = recorded_for(folder, re.escape(variant(path)) + r"_p(\d+)_medusa_logits")
    target, drafter = target_of(folder), heads_of(folder, path)
    forward = jax.jit(lambda *inputs: target.forward(target.params, *inputs).hidden)
    for match in found:
        case = match[0].removesuffix("medusa_logits")
        ids = golden.int32(recorded[case + "input_ids"])
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        hidden = forward(ids, positions)
        np.testing.assert_allclose(hidden, recorded[case + "hidden"], **CLOSE)
        said = target.logits(target.params, hidden)
        np.testing.assert_allclose(said, recorded[case + "lm_logits"], **CLOSE)
        ours = np.moveaxis(np.asarray(logits(drafter, recorded[case + "hidden"])), 2, 0)
        np.testing.assert_allclose(ours, recorded[match[0]], **CLOSE)


@each_heads(lambda recorded, path: f"{variant(path)}_logits_distinct_layers" in recorded)
def test_layers_that_differ_are_kept_apart(heads):
    """The reference's own loader gives both layers the last one's weights; the file has two."""
    folder, path = heads
    name = f"{variant(path)}_logits_distinct_layers"
    recorded = golden.arrays(folder / "io.npz")
    ours = logits(heads_of(folder, path), recorded[f"{variant(path)}_hidden"])
    np.testing.assert_allclose(np.moveaxis(np.asarray(ours), 2, 0), recorded[name], **CLOSE)
    theirs = recorded[f"{variant(path)}_logits_fasterdecoding_loader"]
    assert np.abs(np.moveaxis(np.asarray(ours), 2, 0) - theirs).max() > 0.01


@each_heads(lambda _, path: path.name.startswith("vllm_") and other_layout(path).exists())
def test_both_layouts_hold_the_same(heads):
    folder, path = heads
    ours, theirs = heads_of(folder, path), heads_of(folder, other_layout(path))
    assert ours.heads.format == "vllm-medusa"
    assert theirs.heads.format == "medusa"
    assert ours.config == theirs.config
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


@each_heads(lambda *_: True)
def test_the_file_holds_what_its_config_says(heads):
    folder, path = heads
    drafter, said = heads_of(folder, path), open_draft_checkpoint(path).config
    assert drafter.config.num_heads == said.get("medusa_num_heads", said.get("num_heads"))
    assert not drafter.heads.remarks


def trees_with(pattern):
    """Trees for which the set records arrays of such names."""
    found = [
        (folder, name)
        for folder in golden.folders_with("trees_posterior.npz", "choices.json")
        for name in golden.facts(folder / "choices.json")
        if any(
            re.fullmatch(pattern.format(re.escape(name)), key)
            for key in golden.arrays(folder / "trees_posterior.npz")
        )
    ]
    return golden.parametrize(
        "tree_of", found, "Medusa trees", lambda x: f"{golden.label(x[0])}-{x[1]}"
    )


def shape_and_buffers(folder, name):
    tree = from_choices(golden.facts(folder / "choices.json")[name])
    recorded = golden.arrays(folder / "trees_posterior.npz")
    prefix = f"{name}_"
    return tree, {
        key.removeprefix(prefix): value for key, value in recorded.items() if key.startswith(prefix)
    }


def leaf_paths(tree):
    """Node ids from the root to each leaf, in the reference's order: by choices, reversed."""
    parents = tree.parents
    choices = ((), *tree.choices)
    leaves = [node for node in range(tree.num_nodes) if node not in parents]
    paths = []
    for leaf in sorted(leaves, key=lambda node: (len(choices[node]), choices[node]), reverse=True):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    return paths


@trees_with("{}_tree_indices")
def test_tree_buffers(tree_of):
    tree, theirs = shape_and_buffers(*tree_of)
    links = tree.links()
    nodes = np.arange(tree.num_nodes)
    words = np.asarray(links.ancestors)[0]
    seen = (words[:, nodes // 32] >> (nodes % 32)) & 1
    np.testing.assert_array_equal(seen, theirs["medusa_attn_mask"][0, 0])
    np.testing.assert_array_equal(np.asarray(links.depth)[0], theirs["medusa_position_ids"])
    depth, rank = np.asarray(tree.depths), np.asarray(tree.ranks)
    width = 10  # the reference takes ten candidates of every head, whatever the tree asks for
    flat = np.where(depth == 0, 0, 1 + width * (depth - 1) + rank)
    np.testing.assert_array_equal(flat, theirs["tree_indices"])
    paths = leaf_paths(tree)
    padded = np.full((len(paths), tree.path_width), -1)
    for row, path in enumerate(paths):
        padded[row, : len(path)] = path
    np.testing.assert_array_equal(padded, theirs["retrieve_indices"])


@trees_with(r"post_{}_\d+_greedy")
def test_greedy_walks(tree_of):
    """The same path as `evaluate_posterior` at temperature 0, but for its padding trap.

    It pads short leaves with token 0 and reads their logits at the last node of the tree, so a leaf
    whose next token is 0 seems to go on. Taking that over would emit a token the target never
    chose; ours stops at the leaf, with one token fewer.
    """
    folder, name = tree_of
    tree, buffers = shape_and_buffers(folder, name)
    recorded = golden.arrays(folder / "trees_posterior.npz")
    cases = [m[1] for m in map(re.compile(rf"(post_{name}_\d+_)greedy").fullmatch, recorded) if m]
    links = tree.links()
    parent = jnp.asarray(tree.parents, jnp.int32)[None]
    retrieve = buffers["retrieve_indices"]
    for case in cases:
        best, accepted = recorded[case + "greedy"]
        predict = golden.int32(recorded[case + "node_logits"].argmax(axis=1))[None]
        walk = greedy_walk(
            golden.int32(recorded[case + "node_tokens"])[None],
            (parent, links.first_child, links.next_sibling),
            predict,
            max_path=tree.path_width,
        )
        theirs = retrieve[best, : accepted + 1]
        real = theirs[theirs >= 0]  # shorter in the trap
        ours = np.asarray(walk.path)[0, : int(walk.length[0])]
        np.testing.assert_array_equal(ours, real)
        if len(real) < len(theirs):
            assert predict[0, real[-1]] == 0, "a longer path without the trap"


@golden.parametrize("folder", SETS, "Medusa set", golden.label)
def test_candidates(folder):
    found, recorded = recorded_for(folder, r"(\w+?)_p(\d+)_tree_candidates_(\w+)")
    if not found:
        pytest.skip("no candidates are recorded")
    choices = golden.facts(folder / "choices.json")
    for match in found:
        label = {"mc63": "mc_sim_7b_63"}.get(match[3], match[3])
        drafter = heads_of(folder, folder / f"vllm_{match[1]}")
        case = f"{match[1]}_p{match[2]}_"
        hidden = jnp.asarray(recorded[case + "hidden"][:, -1])
        root = golden.int32(recorded[case + "lm_logits"][:, -1].argmax(axis=-1))
        tree = from_choices(choices[label])
        drafted = propose(drafter, hidden, root, tree).tree
        np.testing.assert_array_equal(drafted.token, recorded[match[0]])
        paths = leaf_paths(tree)
        theirs = recorded[f"{case}cart_candidates_{match[3]}"]
        for row, path in zip(theirs, paths):
            np.testing.assert_array_equal(np.asarray(drafted.token)[0, path], row[: len(path)])


def propose(drafter, hidden, root, tree):
    batch = len(root)
    context = DraftContext(
        tokens=jnp.zeros((batch, 8), jnp.int32),
        lengths=jnp.ones(batch, jnp.int32),
        root=root,
        active=jnp.ones(batch, bool),
        keys=jnp.zeros((batch, 2), jnp.uint32),
    )
    return jax.jit(lambda h: drafter.propose(drafter.params, h, context, tree))(hidden)


GENERATED = [
    pytest.param(folder, *key, id="-".join((golden.label(folder), *key)))
    for folder in SETS
    for key in sorted({m.groups() for m in recorded_for(
        folder, r"(\w+?)_gen_(\w+)_p\d+_t0\.0_output_ids")[0]})
]  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "heads", "name"),
    GENERATED
    or [pytest.param(*[None] * 3, marks=pytest.mark.skip(reason=f"no runs in {golden.ROOT}"))],
)
def test_greedy_generations(folder, heads, name):
    """The same tokens and, round by round, the same accepted lengths."""
    found, recorded = recorded_for(folder, rf"{heads}_gen_{name}_p(\d+)_t0\.0_output_ids")
    drafter = heads_of(folder, folder / f"vllm_{heads}")
    tree = from_choices(golden.facts(folder / "choices.json")[name])
    engine = jspec.Engine(target_of(folder), drafter, tree=tree, batch_size=len(found))
    cases = [match[0].removesuffix("output_ids") for match in found]
    prompts = [recorded[f"{heads}_p{match[1]}_input_ids"][0].tolist() for match in found]
    accepted = [recorded[case + "best_accept"][:, 1] for case in cases]
    # The reference ends with a round's bonus still in hand; ours counts it as emitted.
    asked = [
        jspec.SamplingParams(max_new_tokens=int((lengths + 1).sum()) + 1, ignore_eos=True)
        for lengths in accepted
    ]
    for case, prompt, lengths, output in zip(
        cases, prompts, accepted, engine.generate(prompts, asked)
    ):
        plain = recorded[case + "greedy_ids"][0, len(prompt) :]
        np.testing.assert_array_equal(output.token_ids[: len(plain)], plain)
        theirs = recorded[case + "output_ids"][0, len(prompt) :]
        agree = len(theirs) == len(plain) and (theirs == plain).all()
        if not agree:  # the padding trap of `test_greedy_walks` made it leave the target's text
            assert 0 in theirs
            continue
        np.testing.assert_array_equal(np.asarray(output.stats.accept_lengths) - 1, lengths)
