"""The step thread's state: sequences, prefix cache, steps in flight."""
