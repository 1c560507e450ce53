"""Model families: one file each, read top to bottom."""
