"""`jspec data inspect`: data as a training run would see it."""

from rich.console import Console

from jspec.checkpoints.fetch import resolve_source
from jspec.tokenizer import load_tokenizer
from train.data import load_dataset
from train.data.inspect import show
from train.options import Inspect


def run(options: Inspect) -> int:
    """Print the report; only the tokenizer of the target is loaded."""
    tokenizer = load_tokenizer(resolve_source(options.target))
    dataset = load_dataset(
        options.data,
        tokenizer,
        max_length=options.max_length,
        limit=options.limit,
        last_turn_only=options.last_turn_only,
    )
    show(dataset, tokenizer, Console(), sample=options.sample)
    return 0
