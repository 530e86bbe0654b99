"""A real EAGLE-3 head on a real model, against what the EAGLE repository generated with it."""

import collections
import json

import golden
import pytest
from own_process import run_python

REAL = golden.ROOT.parent / "real"
RECORDS = REAL / "mt_bench.json"
HEAD = REAL / "eagle3-prototype"

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(
        not (RECORDS.exists() and HEAD.is_dir()), reason=f"no recorded generations at {REAL}"
    ),
]

# Wide trees cost seconds a round on a CPU: fewer prompts of them.
PROMPTS = {8: 10, 26: 2, 60: 1}


def settings():
    """(num_steps, topk, num_nodes) with their recorded generations."""
    if not RECORDS.exists():
        return []
    found = collections.defaultdict(list)
    for row in json.loads(RECORDS.read_text()):
        found[row["depth"] + 1, row["top_k"], row["total_token"]].append(row)
    return sorted(found.items(), key=lambda item: item[0][2])


GENERATE = """
import json, sys, jspec
target_path, head, shape, prompts, new = json.load(sys.stdin)
target = jspec.load_target(target_path, dtype="float32")
drafter = jspec.load_drafter(head, target, probe=False)
tree = jspec.TreeConfig(num_steps=shape[0], topk=shape[1], num_nodes=shape[2])
engine = jspec.Engine(target, drafter, tree=tree, batch_size=len(prompts))
# The reference goes on to the end of the round that passes the limit.
asked = [jspec.SamplingParams(max_new_tokens=count + 1, ignore_eos=True) for count in new]
outputs = engine.generate(prompts, asked)
json.dump([(o.token_ids, o.stats.accept_lengths) for o in outputs], sys.stdout)
"""


@pytest.mark.parametrize(("shape", "rows"), settings(), ids=lambda value: str(value)[:12])
def test_same_text_and_accept_lengths(real_path, shape, rows):
    rows = rows[: PROMPTS.get(shape[2], 2)]
    asked = [[row["prompt_ids"] for row in rows], [len(new_ids(row)) for row in rows]]
    outputs = run_python(GENERATE, [str(real_path), str(HEAD), shape, *asked])
    tokens, rounds, theirs, differ = 0, 0, 0, 0
    for row, (token_ids, mine) in zip(rows, outputs):
        assert token_ids[: len(new_ids(row))] == new_ids(row)
        recorded = [drafts + 1 for drafts in row["accepted_drafts"]]
        tokens, rounds, theirs = tokens + sum(mine), rounds + len(mine), theirs + len(recorded)
        differ += mine != recorded
    # The same tokens in as many rounds; a near tie may move a token to its neighbour round.
    assert abs(rounds / theirs - 1) < 0.01
    assert differ <= max(1, len(rows) // 10)


def new_ids(row):
    ids, prompt = row["output_ids"], row["prompt_ids"]
    return ids[len(prompt) :] if ids[: len(prompt)] == prompt else ids
