"""The heads in the package, and the note beside a head's weights."""

import json

import pytest
from eagle_heads import eagle3_head, save, wide_target

import jspec
from jspec.drafters.shipped import default_drafter, read_note, shipped_heads, suggested_tree
from jspec.trees import StaticTree

HEADS = ("smollm2-135m-eagle3", "smollm2-135m-medusa")
LARGEST = 20_000_000
"""Bytes of one head's folder: the package carries them all."""


def test_heads_are_there():
    assert tuple(shipped_heads()) == HEADS


@pytest.mark.parametrize("name", HEADS)
def test_a_head_says_where_it_comes_from(name):
    folder = shipped_heads()[name]
    note = read_note(folder)
    assert {"target", "tree", "licence", "data", "command", "metrics"} <= note.keys()
    assert note["target"] == "smollm2-135m"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= LARGEST


@pytest.mark.parametrize("name", HEADS)
def test_a_head_loads_for_its_target(name, real_path):
    target = jspec.load_target(real_path, dtype="float32")
    drafter = jspec.load_drafter(name, target, probe=False)
    drafter.check(target, drafter.default_tree())
    assert drafter.default_tree() == suggested_tree(shipped_heads()[name])


def test_only_its_own_target_gets_a_head_unasked():
    assert default_drafter("smollm2-135m") == "smollm2-135m-eagle3"
    assert default_drafter("HuggingFaceTB/SmolLM2-135M-Instruct") == "smollm2-135m-eagle3"
    assert default_drafter("HuggingFaceTB/SmolLM2-135M") == "ngram"
    assert default_drafter("./smollm2-135m") == "ngram"


@pytest.fixture
def noted(tmp_path):
    """A head with a note beside it."""
    target = wide_target()
    save(eagle3_head(target), tmp_path / "head", "specforge")

    def write(text):
        (tmp_path / "head" / "jspec.json").write_text(text, encoding="utf-8")
        return target, tmp_path / "head"

    return write


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (
            {"num_steps": 2, "topk": 3, "num_nodes": 5},
            jspec.TreeConfig(num_steps=2, topk=3, num_nodes=5),
        ),
        ([[0], [1], [0, 0]], 4),
        (None, jspec.TreeConfig()),
    ],
)
def test_a_note_names_the_tree(noted, tree, expected):
    target, folder = noted(json.dumps({"tree": tree}))
    found = jspec.load_drafter(folder, target, probe=False).default_tree()
    if isinstance(found, StaticTree):
        assert found.num_nodes == expected
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"tree": {"depth": 3}}', "is none"),
        ('{"tree": {"num_steps": 0}}', "num_steps=0; expected at least 1"),
        ('{"tree": [[0], [0]]}', "is none"),
        ('{"tree": 5}', "is none"),
    ],
)
def test_a_note_that_cannot_be_meant(noted, text, says):
    target, folder = noted(text)
    with pytest.raises(ValueError, match=says):
        jspec.load_drafter(folder, target, probe=False)
