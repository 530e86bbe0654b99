"""The note beside a head's weights."""

import json

import pytest
from eagle_heads import eagle3_head, save, wide_target

import jspec
from jspec.trees import StaticTree


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
