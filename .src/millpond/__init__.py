"""millpond: an actor runtime for local language models whose KV cache survives restarts.

The code lives in three packages: ``millpond.actors``, ``millpond.runtime`` and ``millpond.codecs``.
Start at ``millpond.runtime``.
"""
