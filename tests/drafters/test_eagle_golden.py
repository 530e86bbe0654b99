"""EAGLE heads against what SafeAILab's code computed: hidden states, trees, whole generations."""

import functools
import re

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec.drafters import DraftContext, Rows
from jspec.targets import Prefix
from jspec.targets.masks import causal_bits
from jspec.trees import from_choices

pytestmark = pytest.mark.once

HEADS = [
    folder
    for folder in golden.folders_with("io.npz", "draft_model")
    if "p0_fc_out" in golden.arrays(folder / "io.npz")
]
TREES = golden.folders_with("trees.npz", "trees.json")
GENERATED = [
    path
    for path in golden.ROOT.rglob("*.json")
    if path.with_suffix(".npz").exists() and "draft_model" in golden.facts(path)
]
STATIC = golden.folders_with("static_tree_v1.npz", "draft_model")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@functools.cache
def loaded(target_path, head_path):
    target = jspec.load_target(target_path)
    return target, jspec.load_drafter(head_path, target, probe=False)


def head_of(folder):
    """The set's own head, or the EAGLE-1 head whose trees it records."""
    own = folder / "draft_model"
    if own.exists():
        return loaded(golden.target_folder(folder), own)
    base = folder.parent / "eagle1"
    return loaded(base / "target", base / "draft_model")


def features(recorded, prompt, drafter):
    """(post-norm hidden, aux features) of one prompt as the set has them."""
    if drafter.feature_layers:
        return None, tuple(recorded[f"{prompt}aux_{level}"] for level in ("low", "mid", "high"))
    return recorded[f"{prompt}target_hidden"], ()


def rows_of(drafter, next_tokens, hidden, aux, lengths):
    """Padded Rows; what a drafter does not read is left at zero."""
    width = next_tokens.shape[1]
    ids = golden.int32(next_tokens)
    blank = np.zeros((*ids.shape, (hidden or aux[0])[0].shape[-1]), np.float32)
    return Rows(
        tokens=ids,
        next_tokens=ids,
        start=jnp.zeros(len(ids), jnp.int32),
        count=golden.int32(lengths),
        hidden=jnp.asarray(blank if hidden is None else golden.padded(hidden, width)),
        features=tuple(jnp.asarray(golden.padded(chunk, width)) for chunk in aux),
    )


@golden.parametrize("folder", HEADS, "EAGLE head", ids=golden.label)
class TestForward:
    def test_target_gives_the_features_the_head_reads(self, folder):
        target, drafter = head_of(folder)
        recorded = golden.arrays(folder / "io.npz")
        for prompt in golden.prompts(recorded, "input_ids"):
            ids = golden.int32(recorded[f"{prompt}input_ids"])
            passed = target.forward(
                target.params,
                ids,
                jnp.arange(ids.shape[1], dtype=jnp.int32)[None],
                feature_layers=drafter.feature_layers,
            )
            hidden, aux = features(recorded, prompt, drafter)
            if hidden is None:
                hidden = recorded[f"{prompt}target_last_hidden_normed"]
            np.testing.assert_allclose(passed.hidden, hidden, **CLOSE)
            assert len(passed.features) == len(aux)
            for got, want in zip(passed.features, aux):
                np.testing.assert_allclose(got, want, **CLOSE)

    def test_prefill_and_steps(self, folder):
        _, drafter = head_of(folder)
        recorded = golden.arrays(folder / "io.npz")
        model = nnx.merge(drafter.graphdef, drafter.params)
        carried_name = "hidden_carried" if drafter.feature_layers else "hidden"
        logits_name = "draft_logits" if drafter.feature_layers else "logits"

        @jax.jit
        def run(rows, cache):
            width = rows.tokens.shape[1]
            place = jnp.arange(width, dtype=jnp.int32)[None]
            bits = causal_bits(width)
            prefix = Prefix(cache, rows.start)
            fused = model.fuse(rows)
            carried, new = model(rows.next_tokens, fused, place, prefix, bits)
            joined = jnp.concatenate([model.embed(rows.next_tokens), fused], axis=-1)
            fc_out = fused if drafter.feature_layers else model.fc(joined)
            kept = cache.commit(new, place, rows.count, rows.start)
            return fc_out, carried, model.logits(carried), kept

        @jax.jit
        def step(token, hidden, length, cache):
            prefix = Prefix(cache, length)
            carried, new = model(token[:, None], hidden[:, None], length[:, None], prefix, one)
            path = jnp.zeros((1, 1), jnp.int32)
            kept = cache.commit(new, path, jnp.ones(1, jnp.int32), length)
            return carried[:, 0], model.logits(carried)[:, 0], kept

        one = causal_bits(1)
        prompts = golden.prompts(recorded, "fc_out")
        assert prompts
        for prompt in prompts:
            ids = recorded[f"{prompt}draft_input_ids"]
            count = ids.shape[1]
            hidden, aux = features(recorded, prompt, drafter)
            wide = golden.padded([ids], 64)
            rows = rows_of(
                drafter, wide, None if hidden is None else [hidden], [[a] for a in aux], [count]
            )
            cache = drafter.init_state(drafter.params, 1, 80).cache
            fc_out, carried, logits, cache = run(rows, cache)
            for got, name in (
                (fc_out, "fc_out"),
                (carried, f"prefill_{carried_name}"),
                (logits, f"prefill_{logits_name}"),
            ):
                np.testing.assert_allclose(got[:, :count], recorded[prompt + name], **CLOSE)
            for layer, (keys, values) in enumerate(zip(cache.keys, cache.values)):
                stem = "kv" if drafter.feature_layers else f"kv_layer{layer}"
                for got, kind in ((keys, "k"), (values, "v")):
                    want = recorded[f"{prompt}{stem}_{kind}"].transpose(0, 2, 1, 3)
                    np.testing.assert_allclose(got[:, :count], want, **CLOSE)

            position = golden.int32([count])
            state = carried[:, count - 1]
            last = logits[:, count - 1]
            for index, token in enumerate(recorded[f"{prompt}step_input_token"]):
                best = int(jnp.argmax(last))
                best = best if drafter.token_map is None else drafter.token_map[best]
                assert best == token
                assert int(position[0]) == recorded[f"{prompt}step_position"][index]
                state, last, cache = step(golden.int32([token]), state, position, cache)
                want = recorded[f"{prompt}step_{carried_name}"][index]
                np.testing.assert_allclose(state[0], want, **CLOSE)
                want = recorded[f"{prompt}step_{logits_name}"][index]
                np.testing.assert_allclose(last[0], want, **CLOSE)
                position = position + 1


def leaves(parent):
    """EAGLE's retrieve_indices in greedy order: a row a leaf, by node id, padded with -1."""
    ends = [node for node in range(len(parent)) if node not in set(parent)]
    paths = []
    for node in ends:
        path = [node]
        while path[-1]:
            path.append(parent[path[-1]])
        paths.append(path[::-1])
    width = max(map(len, paths))
    return np.asarray([path + [-1] * (width - len(path)) for path in paths])


def dense(tree):
    """The tree mask, [T, T]."""
    words = np.asarray(tree.ancestors[0])
    node = np.arange(tree.num_nodes)
    return (words[:, node // 32] >> (node % 32).astype(np.uint32)) & 1


def tree_cases():
    for folder in TREES:
        for setting in golden.facts(folder / "trees.json")["settings"]:
            yield pytest.param((folder, setting), id=f"{golden.label(folder)}-s{setting['index']}")


@golden.parametrize("case", list(tree_cases()), "recorded draft tree")
def test_dynamic_trees(case):
    folder, setting = case
    _, drafter = head_of(folder)
    recorded = golden.arrays(folder / "trees.npz")
    shape = jspec.TreeConfig(
        num_steps=setting["depth"] + 1, topk=setting["top_k"], num_nodes=setting["total_token"]
    )
    pattern = re.compile(rf"s{setting['index']}_p(\d+)_draft_tokens$")
    numbers = [int(match.group(1)) for key in recorded if (match := pattern.match(key))]
    assert numbers
    known = [recorded[f"s{setting['index']}_p{n}_input_ids_with_next"] for n in numbers]
    taken = [recorded[f"p{n}_target_hidden"] for n in numbers]
    lengths = np.asarray([ids.shape[1] - 1 for ids in known])
    if drafter.feature_layers:
        parts = [np.split(features, len(drafter.feature_layers), axis=-1) for features in taken]
        hidden, aux = None, list(zip(*parts))
    else:
        hidden, aux = taken, []
    rows = rows_of(drafter, golden.padded([ids[:, 1:] for ids in known], 64), hidden, aux, lengths)

    @jax.jit
    def propose(params, rows, root):
        state = drafter.init_state(params, len(known), 80)
        state = drafter.prefill(params, state, rows)
        keys = jnp.zeros((len(known), 2), jnp.uint32)
        active = jnp.ones(len(known), bool)
        context = DraftContext(rows.tokens, rows.count, root, active, keys)
        return drafter.propose(params, state, context, shape).tree

    trees = propose(drafter.params, rows, golden.int32([ids[0, -1] for ids in known]))
    for slot, number in enumerate(numbers):
        stem = f"s{setting['index']}_p{number}_"
        tree = jax.tree.map(lambda leaf, slot=slot: leaf[slot : slot + 1], trees)
        assert bool(tree.valid.all())
        np.testing.assert_array_equal(tree.token, recorded[f"{stem}draft_tokens"])
        np.testing.assert_array_equal(tree.depth[0], recorded[f"{stem}tree_position_ids"])
        np.testing.assert_array_equal(dense(tree), recorded[f"{stem}tree_mask"][0, 0])
        np.testing.assert_array_equal(
            leaves(np.asarray(tree.parent[0]).tolist()), recorded[f"{stem}retrieve_indices"]
        )
        chosen = recorded[f"{stem}all_scores"][recorded[f"{stem}selected_sorted"]]
        np.testing.assert_allclose(tree.score[0, 1:], np.exp(chosen), rtol=1e-4, atol=1e-6)


@golden.parametrize("path", sorted(GENERATED), "EAGLE generation", ids=golden.label)
def test_whole_generations(path):
    meta, recorded = golden.facts(path), golden.arrays(path.with_suffix(".npz"))
    target, drafter = loaded(
        (path.parent / meta["target"]).resolve(), (path.parent / meta["draft_model"]).resolve()
    )
    shape = jspec.TreeConfig(
        num_steps=meta["depth"] + 1, topk=meta["top_k"], num_nodes=meta["total_token"]
    )
    engine = jspec.Engine(target, drafter, tree=shape, batch_size=len(meta["cases"]))
    prompts, asked = [], []
    for case in meta["cases"]:
        stem = f"c{case['case']}_"
        prompts.append(recorded[f"{stem}input_ids"][0].tolist())
        # The reference goes on to the end of the round that passes a limit or an end token.
        new = recorded[f"{stem}output_ids"].shape[1] - len(prompts[-1])
        asked.append(jspec.SamplingParams(max_new_tokens=new + 1, ignore_eos=True))
    for case, prompt, output in zip(meta["cases"], prompts, engine.generate(prompts, asked)):
        stem = f"c{case['case']}_"
        want = recorded[f"{stem}output_ids"][0, len(prompt) :].tolist()
        assert output.token_ids[: len(want)] == want
        accepted = [length - 1 for length in output.stats.accept_lengths]
        assert accepted == recorded[f"{stem}accept_length"].tolist()


def static_cases():
    for folder in STATIC:
        for name, choices in golden.facts(folder / "static_tree_v1.json")["choices"].items():
            yield pytest.param((folder, name, choices), id=f"{golden.label(folder)}-{name}")


@golden.parametrize("case", list(static_cases()), "static EAGLE-1 tree")
def test_static_trees(case):
    folder, name, choices = case
    target, drafter = head_of(folder)
    recorded = golden.arrays(folder / "static_tree_v1.npz")
    shape = from_choices(choices)
    prompts = [
        recorded[key]
        for number in range(len(recorded))
        if (key := f"{name}_p{number}_input_ids_with_next") in recorded
    ]
    assert prompts
    engine = jspec.Engine(target, drafter, tree=shape, batch_size=len(prompts))
    outputs = engine.generate(
        [ids[0, :-1].tolist() for ids in prompts],
        [
            jspec.SamplingParams(
                max_new_tokens=recorded[f"{name}_p{n}_output_ids"].shape[1] - ids.shape[1] + 2,
                ignore_eos=True,
            )
            for n, ids in enumerate(prompts)
        ],
    )
    for number, (ids, output) in enumerate(zip(prompts, outputs)):
        stem = f"{name}_p{number}_"
        first = next(engine.stream(ids[0, :-1].tolist(), jspec.SamplingParams(max_new_tokens=8)))
        assert first.token_ids == [ids[0, -1]]
        want = recorded[f"{stem}output_ids"][0, ids.shape[1] - 1 :].tolist()
        assert output.token_ids[: len(want)] == want
        accepted = [length - 1 for length in output.stats.accept_lengths]
        assert accepted == recorded[f"{stem}accept_length"].tolist()
    mask = recorded[f"{name}_verify_tree_attn_mask"][0, 0]
    links = shape.links()
    node = np.arange(shape.num_nodes)
    bits = (np.asarray(links.ancestors[0])[:, node // 32] >> (node % 32).astype(np.uint32)) & 1
    np.testing.assert_array_equal(bits, mask)
    np.testing.assert_array_equal(links.depth[0], recorded[f"{name}_verify_tree_position_ids"])
