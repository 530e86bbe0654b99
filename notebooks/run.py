"""Executes every notebook in a fresh kernel: `python notebooks/run.py [--check] [NAME …]`.

Without --check the outputs are written back into the notebooks. Needs `pip install
'jspec[notebooks]'`. Exit code 1 where a cell raised, or all took longer than the limit.
"""

import argparse
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

FOLDER = Path(__file__).resolve().parent
LIMIT = 600.0
"""Seconds that all notebooks together may take on two cores."""


def execute(path: Path, seconds: float) -> nbformat.NotebookNode:
    """The notebook with the outputs of this run.

    Args:
        path: of the notebook; its folder is where it runs.
        seconds: that a cell may take.
    """
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    NotebookClient(
        notebook,
        timeout=max(1, int(seconds)),
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
    ).execute()
    # What differs from machine to machine, and says nothing: logs on stderr among it.
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return notebook


def main() -> int:
    """Execute what was asked for, in order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="such as 2_one_round; default all")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for all of them")
    args = parser.parse_args()
    paths = [FOLDER / f"{Path(name).stem}.ipynb" for name in args.names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        known = ", ".join(path.stem for path in sorted(FOLDER.glob("*.ipynb")))
        parser.error(f"no notebook {', '.join(missing)}; expected {known}")
    begin = time.monotonic()
    for path in paths or sorted(FOLDER.glob("*.ipynb")):
        start = time.monotonic()
        try:
            notebook = execute(path, args.limit - (start - begin))
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"{path.name} failed: {error}", file=sys.stderr)
            return 1
        if not args.check:
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)
    seconds = time.monotonic() - begin
    print(f"all: {seconds:.0f} s of {args.limit:.0f} s")
    return int(seconds > args.limit)


if __name__ == "__main__":
    sys.exit(main())
