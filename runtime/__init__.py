"""The public names: ``open_runtime``, its configuration, its parameters and its errors."""
