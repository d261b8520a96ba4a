import pytest
import torch

from engine.cuda.options import StepShape
from engine.cuda.products.blas import with_faster_library


@pytest.fixture
def chosen(monkeypatch):
    """The libraries that were chosen, and the one in use."""
    calls = ["cublas"]

    def preferred(backend=None):
        if backend is not None:
            calls.append(backend)
        return calls[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    return calls


@pytest.mark.parametrize(
    ("device", "rows", "library"),
    [("cuda", 80, "cublaslt"), ("cuda", 128, "cublas"), ("cpu", 80, "cublas")],
)
def test_a_step_takes_the_library_that_is_faster_for_its_rows(chosen, device, rows, library):
    run = with_faster_library(lambda shape: (shape.rows, chosen[-1]), torch.device(device))
    assert run(StepShape(rows=rows, samples=1)) == (rows, library)
    assert chosen[-1] == "cublas"


def test_a_step_that_fails_leaves_the_library_as_it_was(chosen):
    def fail(shape):
        raise ValueError(shape.rows)

    with pytest.raises(ValueError, match="528"):
        with_faster_library(fail, torch.device("cuda"))(StepShape(rows=528, samples=1))
    assert chosen == ["cublas", "cublaslt", "cublas"]
