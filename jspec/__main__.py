"""`python -m jspec`, the same as `jspec`."""

from jspec.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
