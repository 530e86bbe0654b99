"""Training state on disk: the newest for going on, the best for keeping."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import orbax.checkpoint as ocp

from train.state import TrainState

Figure = Literal["tau", "loss"]


class Checkpoints:
    """Two orbax managers below one folder; every checkpoint appears whole or not at all."""

    def __init__(self, folder: Path, *, keep: int, best_by: Figure = "tau"):
        """Open or make the folder.

        Args:
            folder: of the run.
            keep: newest checkpoints to keep.
            best_by: what makes weights the best: a large tau, or a small loss.
        """
        self._best_by: Figure = best_by
        self.newest = ocp.CheckpointManager(
            (folder / "newest").absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, multiprocessing_options=_apart("newest")
            ),
        )
        self.best = ocp.CheckpointManager(
            (folder / "best").absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=1,
                best_fn=lambda metrics: metrics[best_by],
                best_mode="max" if best_by == "tau" else "min",
                multiprocessing_options=_apart("best"),
            ),
        )

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint."""
        return self.newest.latest_step()

    def save(self, step: int, state: TrainState, data: dict[str, Any]) -> None:
        """Keep a state to go on from, unless this step's is there already.

        Args:
            step: its number.
            state: what to keep.
            data: state of the data iterator, and whatever else JSON can hold.
        """
        if step in self.newest.all_steps():
            return
        self.newest.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data)
            ),
        )

    def save_best(self, step: int, params: Any, figures: Mapping[str, Any]) -> bool:
        """Keep weights if no earlier ones are as good; whether they were kept.

        Args:
            step: its number.
            params: the weights.
            figures: of an evaluation; `tau` and `loss` are kept.
        """
        self.best.wait_until_finished()
        before = self.best.best_step()
        metrics = {name: float(figures[name]) for name in get_args(Figure)}
        if before is not None:
            new, old = metrics[self._best_by], self._metrics(before)[self._best_by]
            if not (new > old if self._best_by == "tau" else new < old):
                return False
        self.best.save(step, args=ocp.args.StandardSave(params), metrics=metrics)
        return True

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest state, laid out like `like`, and its data.

        Raises:
            ValueError: there is none.
        """
        step = self.newest.latest_step()
        if step is None:
            raise ValueError(f"no checkpoint in {self.newest.directory}; start without --resume")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        found = self.newest.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore()
            ),
        )
        return found["state"], found["data"]

    def restore_best(self, like: Any) -> tuple[Any, float]:
        """The best weights and their tau.

        Raises:
            ValueError: there are none.
        """
        self.best.wait_until_finished()
        step = self.best.best_step()
        if step is None:
            raise ValueError(f"no weights in {self.best.directory}; nothing was evaluated yet")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        found = self.best.restore(step, args=ocp.args.StandardRestore(abstract))
        return found, self.tau_of(step)

    def tau_of(self, step: int) -> float:
        """What the best weights of a step reached."""
        return self._metrics(step)["tau"]

    def _metrics(self, step: int) -> dict[str, float]:
        return self.best.metrics(step)  # type: ignore[return-value]

    def close(self) -> None:
        """Wait until everything is on disk."""
        for manager in (self.newest, self.best):
            manager.wait_until_finished()
            manager.close()


def _apart(name: str) -> ocp.options.MultiprocessingOptions:
    """Barriers of its own: several processes meet two managers' barriers in different orders."""
    return ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=name)
