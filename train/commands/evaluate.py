"""`jspec train eval`: a head in the real engine, on prompts."""

import json

from rich.console import Console
from rich.table import Table

import jspec
from jspec.cache_dirs import enable_compilation_cache
from jspec.commands.prompts import read_prompts
from train.evaluate import Served, serve
from train.options import Evaluate


def run(options: Evaluate) -> int:
    """Generate for every file of prompts, and report each."""
    enable_compilation_cache()
    files = {path: read_prompts(path, options.limit) for path in options.prompts}
    target = jspec.load_target(options.target)
    drafter = jspec.load_drafter(options.drafter, target)
    tree = jspec.TreeConfig(
        num_steps=options.num_steps, topk=options.topk, num_nodes=options.num_nodes
    )
    engine = jspec.Engine(target, drafter, tree=tree, batch_size=options.batch_size)
    sampling = jspec.SamplingParams(
        temperature=options.temperature, max_new_tokens=options.max_new_tokens, seed=0
    )
    chat = target.tokenizer.has_chat_template
    found: dict[str, Served] = {}
    for path, requests in files.items():
        prompts = [request.as_prompt(chat) for request in requests]
        found[path.stem] = serve(engine, prompts, sampling)
    Console().print(_table(found))
    if options.json is not None:
        figures = {name: vars(served) for name, served in found.items()}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def _table(found: dict[str, Served]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("prompts", "texts", "tokens", "rounds", "tau", "acceptance by depth"):
        table.add_column(name, justify="left" if name == "prompts" else "right")
    for name, served in found.items():
        depths = " ".join(f"{x:.3f}" for x in served.acceptance)
        table.add_row(
            name,
            str(served.texts),
            str(served.tokens),
            str(served.rounds),
            f"{served.tau:.3f}",
            depths,
        )
    return table
