"""`jspec data features`: the target's hidden states of a data file, written once."""

from rich.console import Console
from rich.progress import Progress

from jspec.cache_dirs import enable_compilation_cache
from jspec.drafters.eagle_config import default_feature_layers
from jspec.targets import load_target
from train.data import Schedule
from train.methods.common import prepare
from train.methods.features import stored_features
from train.options import Features


def run(options: Features) -> int:
    """Say how much it will be, then write what is missing."""
    if options.data.features is None:
        raise ValueError("--features is missing: the folder to write to")
    if options.model.compilation_cache:
        enable_compilation_cache()
    target = load_target(options.model.target)
    prepared = prepare(options.data, target, lookback=0, seed=0, eval_batches=0)
    layers = options.feature_layers or default_feature_layers(target.config.num_layers)
    store, fill = stored_features(options.data.features, target, prepared, layers)
    console = Console(stderr=True)
    console.print(
        f"{prepared.dataset.num_tokens:,} tokens, {store.shape.row.itemsize:,} bytes each: "
        f"{store.num_bytes / 1e9:.2f} GB in {options.data.features}; "
        f"{len(store.missing()):,} of {len(prepared.examples):,} examples are missing",
        highlight=False,
    )
    if options.model.dry_run:
        return 0
    sides = [prepared.schedule]
    if prepared.validation:
        config = prepared.schedule.config
        sides.append(Schedule(prepared.validation, config, first=len(prepared.training)))
    batches = [(side, i) for side in sides for i in range(side.batches_per_epoch)]
    with Progress(console=console, disable=not console.is_terminal) as progress:
        for side, index in progress.track(batches, description="features"):
            fill(side[index])
    return 0
