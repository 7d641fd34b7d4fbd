"""A chip that is never there, and compilers for it: one that works, and each way to fail."""

from __future__ import annotations

import os
import sys
import time

from polysilicon.api import Compiled, Device, Kernel, hookimpl

OFFLINE = {
    "rms_norm": "works",
    "silu_and_mul": "crashes",
    "gelu_and_mul": "hangs",
    "layer_norm": "raises",
    "linear": "does_nothing",
    "lm_head": "is_slow",
    "embedding": "names_another",
    "rms_norm_gated": "repeats",
    "kv_store": "lacks_its_compiler",
}


@hookimpl
def polysilicon_devices():
    return [Device(name="forge:f1", kind="forge", arch="f1", present=False)]


@hookimpl
def polysilicon_kernels(device):
    for op, function in OFFLINE.items():
        yield Kernel(
            op=op,
            name=f"{op}.forge",
            target="acme_offline:never_runs",
            device="forge",
            offline=f"acme_offline:{function}",
        )


def _compiled(op, variant, seconds=0.5, **facts):
    return Compiled(
        kernel=f"{op}.forge",
        variant=variant,
        seconds=seconds,
        facts={"toolchain": "anvil 1.2", "registers": 40, "spills": 0} | facts,
    )


def works(device):
    assert device.arch == "f1"
    print("chatter on standard output")
    yield _compiled("rms_norm", "hidden 64", code_bytes=int(os.environ.get("ACME_CODE", "512")))
    yield _compiled("rms_norm", "hidden [big]", matrix_instruction="hammer")


def crashes(device):
    yield _compiled("silu_and_mul", "hidden 64")
    sys.stderr.write("anvil: internal error\n")
    sys.stderr.flush()
    os.abort()


def hangs(device):
    time.sleep(600)
    yield _compiled("gelu_and_mul", "never")


def raises(device):
    raise RuntimeError("no such instruction")


def lacks_its_compiler(device):
    import anvil_compiler  # there is no such module

    return anvil_compiler.compile(device)


def does_nothing(device):
    return []


def is_slow(device):
    return [_compiled("lm_head", "vocabulary 32000", seconds=46.0)]


def names_another(device):
    return [_compiled("linear", "in 64")]


def repeats(device):
    return [_compiled("rms_norm_gated", "hidden 64"), _compiled("rms_norm_gated", "hidden 64")]
