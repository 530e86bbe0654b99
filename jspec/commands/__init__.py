"""The commands of the `jspec` command line, one module each; `jspec.cli` chooses among them."""
