"""Quantised checkpoints: what config.json states, and matrices from their tensors
(engine.model.matrices chooses the form).

stated: `quantization_config` as a value; formats that are refused, by name.
tensors: tensors of one module, with their checks.
scaled: FP8 and INT8 matrices, a code to an element.
packed: AWQ, GPTQ and compressed-tensors, several codes to a word.
"""
