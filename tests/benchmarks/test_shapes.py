"""The experiment on shapes: every position is drafted at, and what must not be is noticed."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from scripted_drafters import Scripted, answers_from
from tiny_models import tiny_target

import jspec
from jspec.trees import cartesian, chain, from_choices

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def shapes():
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("shapes")
    finally:
        sys.path.remove(str(FOLDER))


def rounds(shapes, *correct):
    return shapes.Rounds(np.asarray(correct), np.zeros(len(correct), int))


def test_every_position_is_drafted_at(shapes):
    target, prompts, new = tiny_target(), [[1, 2, 3], [4, 5]], 9
    plain = jspec.Engine(target, batch_size=2).generate(
        prompts, jspec.SamplingParams(max_new_tokens=new + 8, ignore_eos=True)
    )
    drafter = Scripted(kind="right", answers=answers_from(plain, 64), vocab_size=40)
    seen = shapes.every_position(target, drafter, chain(3), prompts, new)
    assert seen.correct.tolist() == [3] * (2 * new)
    assert seen.first.tolist() == [1] * (2 * new)
    assert seen.accept_length == 4
    assert seen.by_depth(3) == [1, 1, 1]


def test_a_chain_that_beats_a_tree_is_a_fault(shapes):
    seen = {"chain T=6": rounds(shapes, 3, 2), "tree T=8": rounds(shapes, 2, 2)}
    sizes = {"chain T=6": 6, "tree T=8": 8}
    found = shapes.faults_of(seen, sizes, [])
    assert found == ["chain T=6 beats tree T=8: τ 3.500 against 3.000"]
    assert not shapes.faults_of(seen | {"tree T=8": rounds(shapes, 1, 4)}, sizes, [])


def test_a_tree_that_loses_to_a_part_of_itself_is_a_fault(shapes):
    seen = {"tree T=8": rounds(shapes, 1, 1), "tree T=16": rounds(shapes, 0, 4)}
    sizes = {"tree T=8": 8, "tree T=16": 16}
    found = shapes.faults_of(seen, sizes, [("tree T=8", "tree T=16")])
    assert found == ["tree T=16 contains tree T=8 and accepted less in 1 rounds"]


def test_what_contains_what(shapes):
    dynamic = shapes.dynamic_shapes([8, 16])
    deep = from_choices([*chain(shapes.STEPS).choices, (1,)])
    found = shapes.contained_of(dynamic, {"flat": cartesian([2]), "deep": deep})
    assert found == [("tree T=8", "tree T=16"), ("chain T=6", "deep"), ("flat", "deep")]


def test_accuracies_fall_with_depth_like_the_chain(shapes):
    siblings = shapes.Rounds(np.ones(4, int), np.asarray([1, 1, 2, 0]))
    table = shapes.estimate_accuracies(rounds(shapes, 5, 1, 1, 0), siblings)
    np.testing.assert_allclose(table[0, :3], [0.5, 0.25, 0])
    np.testing.assert_allclose(table[1], table[0] * (1 / 3) / (3 / 4))
