"""Bytes and names: messages, identity, GGUF.  Imports nothing else of millpond, opens no file."""
