"""One file a method: from a target and data to what the loop trains."""
