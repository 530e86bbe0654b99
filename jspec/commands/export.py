"""`jspec export`: a draft head in another format."""

from jspec.commands.options import Export
from jspec.drafters.export import export_head


def run(options: Export) -> int:
    """Write it and say what was done."""
    form = export_head(
        options.drafter,
        options.target,
        options.out,
        to=options.to,
        embedding=options.embedding,
    )
    print(f"{options.out}: {options.to}, from {form}")
    return 0
