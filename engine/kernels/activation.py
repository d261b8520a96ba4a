"""Gates of an MLP."""

from enum import StrEnum


class Activation(StrEnum):
    """The gate of the MLP: act(gate) * up."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"  # the tanh approximation of GELU (Hendrycks and Gimpel, 2016)
