"""A plugin in which everything is wrong, each thing in one way: what the suite must find."""

from __future__ import annotations

import itertools

import torch  # wrong: a plugin's module is light

from polysilicon.api import Device, Kernel, Layout, forced_device, hookimpl

asked = itertools.count()


def _wide(problem):
    return None if problem.facts["hidden"] > 1 else "narrow"  # wrong: facts may be missing


@hookimpl
def polysilicon_devices():
    assert torch.device("cpu").type == "cpu"
    found = [Device(name="mutants:m1", kind="mutants", arch="m1", compile_default=False)]
    if forced_device() == "mutants:m2":
        found.append(Device(name="mutants:m2", kind="mutants", arch="m2", present=False))
    return found


@hookimpl
def polysilicon_layouts(device):
    if device.kind != "mutants":
        return []
    return [
        Layout(
            name="mutants.loses_tail",
            role="linear_weight",
            dims=("N", "K/16", "16"),
            pack="acme_mutants_kernels:pack_whole_tiles",
            unpack="acme_mutants_kernels:unpack_tiles",
        ),
        Layout(
            name="mutants.pads_with_ones",
            role="expert_weight",
            dims=("E", "N", "K/16"),  # wrong: pack gives four dims
            pack="acme_mutants_kernels:pack_with_ones",
            unpack="acme_mutants_kernels:unpack_tiles",
        ),
    ]


def _kernel(op, mutant, **more):
    more.setdefault("target", f"acme_mutants_kernels:{mutant}")
    more.setdefault("device", "mutants:m1")
    return Kernel(op=op, name=f"{op}.{mutant}", **more)


@hookimpl
def polysilicon_kernels(device):
    return [
        _kernel("activation", "interpreted", device="mutants:m2"),
        _kernel("attention", "sees_next_key", rank=1),
        _kernel("attention", "wrong_heads", rank=2),
        _kernel("attention", "window_off_by_one", rank=3),
        _kernel("rms_norm", "eps_outside_root", supports=_wide),
        _kernel("silu_and_mul", "writes_input"),
        _kernel("layer_norm", "stays_float32"),
        _kernel("gelu_and_mul", "ignores_strides"),
        _kernel("linear", "leaves_last_tile", rank=1),
        _kernel("linear", "missing", target="acme_mutants_kernels:nowhere"),
        _kernel("embedding", "noisy", note=f"asked {next(asked)} times"),
        _kernel("activation", "fails_on_nothing"),
        _kernel(
            "rms_norm_gated", "tells_wrong_shape", form="opaque", fake="acme_mutants_kernels:told"
        ),
        _kernel("kv_store", "stores_padding"),
        _kernel("add_rms_norm", "reads_a_number"),
        _kernel("lm_head", "claims_nothing", supports=lambda problem: "never"),
    ]
