"""KV layout, block names, the prefix index, the spill files and the live cache."""
