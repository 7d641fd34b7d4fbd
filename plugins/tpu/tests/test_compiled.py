"""What is read from a compiled program and held against it; the compiler itself: tests/aot."""

from __future__ import annotations

import pytest

from polysilicon.api import PolysiliconError
from polysilicon_tpu import compiled
from polysilicon_tpu.device import devices
from polysilicon_tpu.kernels.rms_norm import offline

PROGRAM = """HloModule jit_run, is_scheduled=true, \
entry_computation_layout={(bf16[64,8]{1,0:T(8,128)}, /*index=1*/bf16[8]{0:T(128)})\
->bf16[64,8]{1,0}}, frontend_attributes={}

ENTRY %main (x: bf16[64,8], w: bf16[8]) -> bf16[64,8] {
  %copy = bf16[64,8]{1,0:T(8,128)S(1)} copy(%x)
  %copy-start = (bf16[8]{0:S(1)}, bf16[8]{0}, u32[]) copy-start(%w)
  %my_norm.1 = bf16[64,8]{1,0} custom-call(%copy), custom_call_target="tpu_custom_call", \
backend_config={"scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"999"}],\
"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"}],"retry_config":{}}
  ROOT %t = bf16[8,64]{1,0} transpose(%my_norm.1), dimensions={1,0}
}
"""


def test_program_says_its_kernels_their_memory_and_what_is_copied() -> None:
    assert compiled.read(PROGRAM) == {
        "custom_calls": "my_norm",
        "vmem_bytes": 4096,
        "copied_bytes": 2 * 64 * 8 * 2,
        "layout": "(bf16[64,8]{1,0:T(8,128)}, bf16[8]{0:T(128)})->bf16[64,8]{1,0}",
    }


def test_program_without_the_kernel_is_a_problem() -> None:
    facts = {"custom_calls": "my_norm", "copied_bytes": 0, "argument_bytes": 1024}
    assert compiled.against(facts, "my_norm") == []
    (problem,) = compiled.against(facts, "other")
    assert problem == "the kernel other is not in the compiled program: it holds my_norm"


def test_copied_activations_are_a_problem_and_a_copied_vector_is_none() -> None:
    facts = {"custom_calls": "my_norm", "copied_bytes": 64, "argument_bytes": 1024}
    assert compiled.against(facts, "my_norm") == []
    (problem,) = compiled.against(facts | {"copied_bytes": 1024}, "my_norm")
    assert problem.startswith("1,024 bytes are copied to another layout")


def test_missing_compiler_is_one_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "find_spec", lambda name: name == "jax" or None)
    (device,) = devices("tpu:v6e")
    with pytest.raises(PolysiliconError, match=r"\(libtpu not installed\): pip install .*\[aot\]"):
        list(offline(device))
