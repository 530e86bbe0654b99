"""Training draft heads: data, objectives, loop, evaluation; `jspec train` and `jspec data`."""
