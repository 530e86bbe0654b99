"""What a data file looks like to a training run: counts, lengths, mask, and one decoded sample."""

from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jspec.tokenizer import Tokenizer
from train.data.chat import Example
from train.data.dataset import Dataset, length_histogram

_BAR = 40


def show(
    dataset: Dataset, tokenizer: Tokenizer | None, console: Console, *, sample: int = 0
) -> None:
    """Print a report.

    Args:
        dataset: checked.
        tokenizer: the target's; without it the sample is shown as ids.
        console: where to.
        sample: number of the example to decode.

    Raises:
        ValueError: no such sample.
    """
    if not 0 <= sample < len(dataset.examples):
        raise ValueError(
            f"no sample {sample}; expected 0 to {len(dataset.examples) - 1} of these examples"
        )
    console.print(_counts(dataset))
    console.print(_lengths(dataset))
    example = dataset.examples[sample]
    console.print(
        Text(f"\nsample {sample} (record {example.id}), supervised between ⟦ and ⟧:", style="bold")
    )
    console.print(marked(example, tokenizer), soft_wrap=True)


def marked(example: Example, tokenizer: Tokenizer | None) -> Text:
    """An example decoded with its special tokens; supervised spans between ⟦ and ⟧ and coloured."""
    text, place = Text(), 0
    for supervised, run in groupby(example.mask.tolist()):
        size = len(list(run))
        ids = example.tokens[place : place + size].tolist()
        place += size
        piece = " ".join(map(str, ids)) if tokenizer is None else tokenizer.backend.decode(ids)
        text.append(f"⟦{piece}⟧" if supervised else piece, style="green" if supervised else "dim")
    return text


def _counts(dataset: Dataset) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "records": f"{dataset.records:,}",
        "examples": f"{len(dataset.examples):,}",
        "cut to the longest length": f"{dataset.truncated:,}",
        "tokens": f"{dataset.num_tokens:,}",
        "supervised": f"{dataset.num_supervised:,} ({100 * dataset.coverage:.1f} %)",
        "fingerprint": dataset.fingerprint,
    }
    for reason, count in dataset.skipped.most_common():
        rows[f"skipped: {reason}"] = f"{count:,}"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _lengths(dataset: Dataset) -> Text:
    bins = length_histogram(dataset.examples)
    most = max(count for _, count in bins)
    text = Text("\nlength up to\n")
    for size, count in bins:
        text.append(f"{size:>8}  {'█' * round(_BAR * count / most):<{_BAR}} {count:,}\n")
    return text
