"""Grammars over a model's vocabulary: compiled within bounds, then one mask of tokens a step."""
