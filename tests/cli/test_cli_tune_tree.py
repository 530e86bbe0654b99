"""`jspec tune-tree`, and the trees it writes in `jspec generate --tree`."""

import json

import pytest
from tiny_medusa import random_heads

import jspec
from jspec.cli import main
from jspec.drafters.medusa_formats import write_heads
from jspec.trees import from_choices

# The heads are random, and loading them says so.
pytestmark = pytest.mark.filterwarnings("ignore:medusa guesses")


@pytest.fixture(scope="module")
def heads(model, tmp_path_factory) -> str:
    """Medusa heads for the tiny chat model."""
    folder = tmp_path_factory.mktemp("drafters") / "heads"
    write_heads(random_heads(jspec.load_target(model).config, num_heads=2), folder, "medusa")
    return str(folder)


@pytest.fixture(scope="module")
def flags(model, heads):
    return ("--no-compilation-cache", "--target", model, "--drafter", heads)


SHORT = ("--limit", "2", "--max-new-tokens", "12", "--num-nodes", "6", "--ranks", "4")


@pytest.fixture
def tree_file(tmp_path):
    def write(content) -> str:
        (tmp_path / "tree.json").write_text(content)
        return str(tmp_path / "tree.json")

    return write


def test_writes_a_tree_that_generate_takes(jspec_run, flags, tmp_path):
    file = tmp_path / "tree.json"
    said = jspec_run("tune-tree", *flags, *SHORT, "--output", str(file))
    assert "right guesses by head and rank" in said
    assert "6 nodes, " in said
    tree = from_choices(json.loads(file.read_text()))
    assert tree.num_nodes == 6
    assert tree.topk <= 4
    text = ("--prompt", "Hello", "--max-new-tokens", "8", "--json")
    found = json.loads(jspec_run("generate", *flags, "--tree", str(file), *text))
    plain = json.loads(jspec_run("generate", *flags[:3], "--drafter", "none", *text))
    assert found["token_ids"] == plain["token_ids"]
    assert found["drafter"] == "medusa"
    assert found["drafted"] == 5 * found["rounds"]


def test_without_a_file_the_tree_goes_to_stdout(jspec_run, flags):
    out = jspec_run("tune-tree", *flags, *SHORT)
    assert from_choices(json.loads(out)).num_nodes == 6


def test_without_a_tree_the_drafter_s_own_depth_is_used(jspec_run, flags):
    text = ("--prompt", "Hello", "--max-new-tokens", "4", "--json")
    found = json.loads(jspec_run("generate", *flags, *text))
    assert len(found["acceptance_by_depth"]) == 2


def test_bench_takes_a_tree(jspec_run, flags, tree_file):
    file = tree_file("[[0], [1], [0, 0]]")
    text = ("--limit", "1", "--max-new-tokens", "6", "--repeats", "1", "--json", "-")
    figures = json.loads(jspec_run("bench", *flags, "--tree", file, *text))
    assert figures["settings"]["tree"] == file
    assert figures["settings"]["num_nodes"] == 4
    assert figures["identical"] == figures["compared"] == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[[0], [1], [0, 0]", "it is not JSON"),
        ('{"choices": [[0]]}', "expected a list of nodes such as [[0], [1], [0, 0]]"),
        ("[[0], [true]]", "expected a list of nodes"),
        ("[[0], 1]", "expected a list of nodes"),
        ("[]", "at least one choice"),
        ("[[0], [1, 0]]", "choice [1, 0] hangs from [1], which is not listed"),
    ],
)
def test_files_that_are_no_trees(jspec_fails, tree_file, content, says):
    words = ("generate", "--target", "no such model", "--prompt", "a")
    assert says in jspec_fails(*words, "--tree", tree_file(content))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--topk", "2"), "--tree gives the whole shape; leave out --topk"),
        (("--drafter", "none"), "--tree needs a drafter"),
    ],
)
def test_flags_that_contradict_a_tree(jspec_fails, tree_file, words, says):
    base = ("generate", "--target", "no such model", "--prompt", "a")
    assert says in jspec_fails(*base, "--tree", tree_file("[[0]]"), *words)


def test_absent_tree(jspec_fails):
    base = ("generate", "--target", "no such model", "--prompt", "a")
    assert "cannot read absent.json: No such file" in jspec_fails(*base, "--tree", "absent.json")


def test_what_has_no_fixed_accuracies_is_refused(jspec_fails, flags):
    says = jspec_fails("tune-tree", *flags[:3], "--drafter", "ngram")
    assert "the guesses of ngram depend on the path" in says
    says = jspec_fails("tune-tree", *flags, "--output", "absent/tree.json")
    assert "the folder absent does not exist" in says


def test_a_tree_deeper_than_the_heads(capsys, flags, tree_file):
    deep = tree_file("[[0], [0, 0], [0, 0, 0]]")
    assert main(["generate", *flags, "--prompt", "a", "--tree", deep]) == 2
    found, complaint = capsys.readouterr().err.splitlines()
    assert "Medusa, 2 heads" in found  # what was loaded is said first
    assert "num_steps=3 levels, but Medusa drafts one a head and has 2 heads" in complaint
