"""Every kernel passes triton's compiler, which refuses code that its interpreter runs."""

import os
import subprocess
import sys

FAMILIES = (
    *("windows", "packed", "llama", "gemma2", "gemma3:256", "olmo2"),
    *("codes:fp8:fp8", "codes:int4"),
)


def test_the_kernels_of_these_families_compile_for_an_absent_gpu(tmp_path):
    settings = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels", *FAMILIES],
        env=settings | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines()}
    assert names.keys() == set(FAMILIES)
    assert {"paged_decode", "paged_prefill", "merge_parts", "row_linear"} <= names["llama"]
    assert names["windows"] == {"windowed_prefill"}
    assert names["packed"] == {"packed_prefill"}
    assert "cap_logits" in names["gemma2"]
    assert "norm_parts" in names["olmo2"]
    few = {"row_linear", "split_linear"}
    assert few | {"norm_codes", "gated_codes"} <= names["codes:fp8:fp8"]
    assert few | {"pair_numbers"} <= names["codes:int4"]
