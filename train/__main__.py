"""`python -m train …`, the same as `jspec train …`."""

import sys

from jspec.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
