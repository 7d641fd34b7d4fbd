"""The process in which the TPU compiler runs: programs on standard input, a line of JSON for each.

`compiled.py` starts it, with the environment that it needs and a limit of time.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

#: A refusal of the compiler can be pages long; its beginning says what does not fit.
_MOST_CHARACTERS = 600


def main() -> None:
    """Compiles what standard input asks for."""
    asked = json.load(sys.stdin)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=asked["topology"])
    where = SingleDeviceSharding(topology.devices[0])
    for program in asked["programs"]:
        begin = time.perf_counter()
        answer = _compiled(program, where)
        answer |= {"variant": program["variant"], "seconds": time.perf_counter() - begin}
        print(json.dumps(answer), flush=True)


def _compiled(program: dict[str, Any], where: SingleDeviceSharding) -> dict[str, Any]:
    module, _, attribute = program["builder"].partition(":")
    builders = importlib.import_module(module)
    function, arguments = getattr(builders, attribute)(**program["parameters"])
    specs = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype in arguments]
    try:
        # An argument that is not used has a layout, too.
        jitted = jax.jit(function, keep_unused=True)
        lowered = jitted.trace(*specs).lower(lowering_platforms=("tpu",))
        executable = lowered.compile()
    except Exception as error:  # whatever the compiler raises is its answer
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return {"error": text[:_MOST_CHARACTERS]}
    memory = executable.memory_analysis()
    return {
        "call": getattr(builders, "CALL", ""),
        # The kernel's own code is in it as text, of no use here and far longer than the rest.
        "hlo": re.sub(r'"body":"[^"]*"', '"body":""', executable.as_text()),
        "memory": {
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "code_bytes": memory.generated_code_size_in_bytes,
        },
    }


if __name__ == "__main__":
    main()
