"""`python -m serve.batch`: the same as `jspec batch`."""

import sys

from jspec.cli import main

if __name__ == "__main__":
    sys.exit(main(["batch", *sys.argv[1:]]))
