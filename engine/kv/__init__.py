"""Paged KV: who owns which block, and the tensors behind them."""
