"""Training draft heads: data, objectives, loop, evaluation. Nothing here yet."""
