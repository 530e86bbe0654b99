"""`jspec tune-tree`: the static tree that suits a set of Medusa heads and the texts at hand."""

import json

import numpy as np
from rich.table import Table

from jspec.commands.figures import check_writable, write_text
from jspec.commands.options import TuneTree
from jspec.commands.parts import encode_all, target_from
from jspec.commands.prompts import read_or_built_in
from jspec.commands.show import PlainConsole
from jspec.drafters import load_drafter
from jspec.drafters.medusa import Medusa
from jspec.drafters.medusa_accuracy import measure_accuracies
from jspec.engine import Engine
from jspec.sampling import SamplingParams
from jspec.trees.search import best_tree, expected_accept_length


def run(options: TuneTree) -> int:
    """Measure the heads on greedy texts, and write the best tree's choices."""
    search = options.search
    if search.output is not None:
        check_writable(search.output)
    requests = read_or_built_in(search.prompts, search.limit)
    options.chat.wanted()
    sampling = SamplingParams(max_new_tokens=search.max_new_tokens)
    target = target_from(options.model)
    drafter = load_drafter(options.model.drafter, target, probe=False)
    if not isinstance(drafter, Medusa):
        raise NotImplementedError(
            f"the guesses of {drafter.name} depend on the path they continue, so one accuracy a "
            "depth and rank does not describe them; tune-tree is for Medusa heads."
        )
    engine = Engine(target, None, batch_size=1)
    prompts = encode_all(engine, requests, options.chat)
    outputs = [engine.generate(ids, sampling)[0] for ids in prompts]
    texts = [([*o.prompt_token_ids, *o.token_ids], len(o.prompt_token_ids)) for o in outputs]
    accuracies = measure_accuracies(target, drafter, texts, ranks=search.ranks)
    tree = best_tree(accuracies, search.num_nodes)
    choices = json.dumps([list(path) for path in tree.choices])
    console = PlainConsole(stderr=search.output is None)
    console.print(_table(accuracies))
    tokens = sum(len(output.token_ids) for output in outputs)
    expected = expected_accept_length(tree, accuracies)
    console.print(
        f"{tree.num_nodes} nodes, {tree.num_steps} levels; τ {expected:.2f} expected from {tokens} "
        f"tokens of {len(texts)} texts"
    )
    if search.output is None:
        print(choices)
    else:
        write_text(search.output, choices + "\n")
    return 0


def _table(accuracies: np.ndarray) -> Table:
    table = Table(title="right guesses by head and rank, %", title_justify="left")
    table.add_column("depth")
    for rank in range(accuracies.shape[1]):
        table.add_column(str(rank), justify="right")
    for depth, row in enumerate(accuracies, start=1):
        table.add_row(str(depth), *(f"{100 * value:.1f}" for value in row))
    return table
