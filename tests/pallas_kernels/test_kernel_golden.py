"""Trees, masks and walks against numbers recorded by running SGLang.

Every set named `sglang_tree` below the golden root is used, whatever its sizes. Batches of one
configuration are joined, since slots do not know of each other.
"""

import functools
import json
import os
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import each_fast_implementation, run

import pallas_kernels as pk

ROOT = Path(
    os.environ.get("JSPEC_GOLDEN", Path(__file__).resolve().parents[3] / "shared/golden/dev")
)
SETS = sorted(path for path in ROOT.rglob("sglang_tree") if (path / "meta.json").exists())


def configs():
    for folder in SETS:
        for config in json.loads((folder / "meta.json").read_text())["configs"]:
            yield pytest.param((folder, config), id=f"{folder.parent.name}-c{config['index']}")


each_config = pytest.mark.parametrize(
    "recorded",
    list(configs())
    or [pytest.param(None, marks=pytest.mark.skip(reason=f"no sglang_tree set below {ROOT}"))],
)


@functools.cache
def arrays(path):
    with np.load(path) as file:
        return dict(file)


def int32(x):
    return jnp.asarray(np.asarray(x), jnp.int32)


class Recording:
    """One configuration's arrays, its batches stacked along the slots."""

    def __init__(self, recorded):
        folder, config = recorded
        self.folder = folder
        self.topk, self.nodes = config["topk"], config["num_draft_tokens"]
        self.meta = json.loads((folder / "meta.json").read_text())
        self.draft = arrays(folder / "draft_tree.npz")
        pattern = re.compile(rf"(c{config['index']}_b\d+_)selected_index$")
        self.cases = [m.group(1) for key in self.draft if (m := pattern.match(key))]
        assert self.cases, f"{folder} records nothing for {config}"

    def stack(self, arrays, name, cases=None):
        parts = [arrays[case + name] for case in (self.cases if cases is None else cases)]
        return np.concatenate([part.reshape(-1, self.nodes, *part.shape[2:]) for part in parts])

    def tree(self, implementation, cases=None):
        cases = self.cases if cases is None else cases
        selected = np.concatenate([self.draft[c + "selected_index"] for c in cases])
        table = np.concatenate([self.draft[c + "parent_list"] for c in cases])
        return run(
            pk.build_tree_from_selection,
            implementation,
            int32(selected),
            int32(table),
            topk=self.topk,
        )

    def lengths(self):
        return np.concatenate([self.draft[c + "seq_lens"] for c in self.cases])


@each_fast_implementation
@each_config
def test_tree_build(implementation, recorded):
    record = Recording(recorded)
    parent, valid, links = record.tree(implementation)
    assert np.asarray(valid).all()
    positions = record.lengths()[:, None] + np.asarray(links.depth)
    np.testing.assert_array_equal(positions, record.stack(record.draft, "positions"))
    first = record.stack(record.draft, "retrieve_next_token")
    following = record.stack(record.draft, "retrieve_next_sibling")
    np.testing.assert_array_equal(links.first_child, first)
    np.testing.assert_array_equal(links.next_sibling, following)
    again = run(pk.build_tree, implementation, parent, valid)
    for a, b in zip(links, again, strict=True):
        np.testing.assert_array_equal(a, b)


@each_config
def test_mask_encodings(recorded):
    record = Recording(recorded)
    _, _, links = record.tree("xla")
    bits = links.ancestors
    full = np.concatenate([record.draft[c + "mask_full"] for c in record.cases])
    lengths = int32(record.lengths())
    np.testing.assert_array_equal(pk.masks.to_full(bits, lengths), full)
    np.testing.assert_array_equal(pk.masks.from_full(full, lengths, record.nodes), bits)
    qlen = np.concatenate([record.draft[c + "mask_qlen"] for c in record.cases])
    qlen = qlen.reshape(-1, record.nodes, record.nodes)
    np.testing.assert_array_equal(pk.masks.to_qlen_only(bits), qlen)
    if record.nodes <= 32:
        packed = record.stack(record.draft, "mask_packed_bytes")
        np.testing.assert_array_equal(pk.masks.to_packed_bytes(bits), packed)


@each_config
def test_links_rebuilt_from_a_mask(recorded):
    record = Recording(recorded)
    if record.cases[0] + "reconstruct_positions" not in record.draft:
        pytest.skip("this set records no rebuilt links")
    qlen = np.concatenate([record.draft[c + "mask_qlen"] for c in record.cases])
    bits = pk.masks.from_qlen_only(jnp.asarray(qlen.reshape(-1, record.nodes, record.nodes)))
    none = jnp.zeros(bits.shape[:2], jnp.int32)
    parent = pk.TreeLinks(none, bits, none, none).parent
    links = run(pk.build_tree, "xla", parent, jnp.ones(parent.shape, bool))
    positions = record.lengths()[:, None] + np.asarray(links.depth)
    np.testing.assert_array_equal(positions, record.stack(record.draft, "reconstruct_positions"))
    for got, name in ((links.first_child, "token"), (links.next_sibling, "sibling")):
        np.testing.assert_array_equal(got, record.stack(record.draft, f"reconstruct_next_{name}"))


def compare(walk, recording, prefixes, nodes):
    """A walk against recorded accept indices, counts and the tokens written at the nodes."""
    index = np.concatenate([recording[p + "accept_index"] % nodes for p in prefixes])
    # Flat ids count on through a batch; the entry says -1 where nothing was accepted.
    empty = np.concatenate([recording[p + "accept_index"] < 0 for p in prefixes])
    count = np.concatenate([recording[p + "accept_len"] for p in prefixes])
    predict = np.concatenate([recording[p + "predict"].reshape(-1, nodes) for p in prefixes])
    np.testing.assert_array_equal(walk.length, count + 1)
    path = np.asarray(walk.path)
    inside = np.arange(path.shape[1])[None] < np.asarray(walk.length)[:, None]
    np.testing.assert_array_equal(~empty, inside)
    np.testing.assert_array_equal(path[inside], index[inside])
    last = path[:, -1]  # the tail repeats the last accepted node
    np.testing.assert_array_equal(last, index[np.arange(len(index)), count])
    np.testing.assert_array_equal(walk.bonus, predict[np.arange(len(last)), last])


@each_fast_implementation
@each_config
def test_greedy_walk(implementation, recorded):
    record = Recording(recorded)
    greedy = arrays(record.folder / "greedy_verify.npz")
    pattern = re.compile(re.escape(record.cases[0]) + r"(\w+)_accept_index$")
    tags = [m.group(1) for key in greedy if (m := pattern.match(key))]
    assert tags
    for tag in tags:
        cases = [c for c in record.cases if f"{c}{tag}_accept_index" in greedy]
        _, _, links = record.tree("xla", cases)
        if f"{cases[0]}{tag}_candidates" in greedy:
            token = record.stack(greedy, f"{tag}_candidates", cases)
        else:
            token = record.stack(record.draft, "draft_tokens", cases)
        # A narrower run of the same verification records no targets of its own.
        own = f"{cases[0]}{tag}_target_predict" in greedy
        target = f"{tag if own else tag.removesuffix('_narrow')}_target_predict"
        width = greedy[f"{cases[0]}{tag}_accept_index"].shape[1]
        walk = run(
            pk.greedy_walk,
            implementation,
            int32(token),
            links,
            int32(record.stack(greedy, target, cases)),
            max_path=width,
        )
        compare(walk, greedy, [f"{c}{tag}_" for c in cases], record.nodes)


@each_fast_implementation
@each_config
def test_sampling_walk(implementation, recorded):
    record = Recording(recorded)
    sampling = arrays(record.folder / "tree_sampling.npz")
    pattern = re.compile(r"(c\d+_b\d+_)(s\d+)(r\d+)_accept_index$")
    found = [m.groups() for key in sampling if (m := pattern.match(key))]
    found = [entry for entry in found if entry[0] in record.cases]
    assert found
    for kind in sorted({(s, r) for _, s, r in found}):
        cases = [c for c, *rest in found if tuple(rest) == kind]
        thresholds = {
            (entry["threshold_single"], entry["threshold_acc"])
            for case in record.meta["cases"]
            for entry in case.get("sampling", [])
            if f"c{case['config']}_b{case['batch']}_" in cases
            and (f"s{entry['case']}", f"r{entry['rep']}") == kind
        }
        assert len(thresholds) == 1
        single, acc = thresholds.pop()
        _, _, links = record.tree("xla", cases)
        prefix = "".join(kind)
        walk = run(
            pk.sampling_walk,
            implementation,
            int32(record.stack(record.draft, "draft_tokens", cases)),
            links,
            jnp.concatenate([sampling[f"{c}{kind[0]}_target_probs"] for c in cases]),
            jnp.concatenate([sampling[f"{c}{prefix}_uniform"] for c in cases]),
            jnp.concatenate([sampling[f"{c}{prefix}_uniform_final"] for c in cases]),
            max_path=sampling[f"{cases[0]}{prefix}_accept_index"].shape[1],
            threshold_single=single,
            threshold_acc=acc,
        )
        compare(walk, sampling, [f"{c}{prefix}_" for c in cases], record.nodes)
