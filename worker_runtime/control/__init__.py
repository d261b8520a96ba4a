"""A worker's event loop: control methods, event streams, grammars."""
