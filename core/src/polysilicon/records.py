"""The records that cross the boundary between core and plugins.

Frozen, keyword-only, self-validating, free of torch: a plugin's answers can be read and explained
on a machine that has neither the chip nor torch. New fields always get a default, so that an old
plugin keeps working.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from polysilicon.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Fact = str | int | float | bool | None
    Supports = Callable[["Problem"], str | None]

Record = TypeVar("Record")

_NAME = re.compile(r"^[a-z0-9][a-z0-9_.:\-]*$")
_DIM = re.compile(r"^([1-9]\d*|\d*[A-Za-z_]\w*)(/([1-9]\d*|[A-Za-z_]\w*))?$", re.ASCII)
_TARGET = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")

#: Names of the dtypes that formats and problems may use (torch's own spelling).
DTYPES = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    }
)
_DTYPE_NAMES = ", ".join(sorted(DTYPES))


#: What the tensors of a layout are.
ROLES = ("linear_weight", "expert_weight", "kv_block", "activation", "embedding")

#: A range of token counts that ends here has an open end.
MOST_TOKENS = 1 << 20


def _check_name(kind: str, name: str) -> None:
    if not isinstance(name, str) or not _NAME.match(name):
        raise RecordError(
            f"{kind} name {name!r} is not valid: use lower-case letters, digits and _ . : - "
            "and start with a letter or digit"
        )


def _check_target(kind: str, name: str, target: str) -> None:
    if not isinstance(target, str) or not _TARGET.match(target):
        raise RecordError(
            f"{kind} {name!r} has target {target!r}: expected 'package.module:attribute'"
        )


@dataclass(frozen=True, kw_only=True)
class Device:
    """One chip that a plugin found on this machine, or that the user forced.

    Attributes:
        name: how users write it, e.g. `cpu`, `nvidia:h200`; unique on a machine.
        kind: vendor part of the name, e.g. `nvidia`.
        arch: architecture, e.g. `sm90`; kernels name it for a more specific match.
        torch_device: torch device string, e.g. `cpu`, `cuda:0`.
        present: False for a device that only `POLYSILICON_DEVICE` forced: it explains and
            compiles, but refuses to run.
        simulated: True where results come from a simulator; labelled so everywhere.
        memory_bytes: device memory, None where unknown.
        compile_default: whether the engine compiles on this device unless told otherwise.
        compile_backend: torch.compile backend, or a lazy `module:attr` target.
        token_buckets: token counts the engine pads to; empty means the engine's own choice.
        graph_capture: whether the device can capture and replay graphs.
        activate: lazy target without arguments that `polysilicon.use()` calls once, before the
            first tensor goes to the device; None where the device needs nothing.
        facts: anything else that kernels or reports want to know (cores, features …). `unusable`
            says what a chip that is here, but not `present`, lacks; users read it. `triton` is for
            a chip that Triton compiles for: a lazy target `(device: Device, kernel: str, variant:
            str, launch: Callable) -> Iterable[Compiled]` that compiles what `launch` launches and
            holds it to the chip's limits; with it, core's kernels in Triton serve the device.
            `native_formats` names the storage dtypes that the chip itself converts and multiplies.
    """

    name: str
    kind: str
    arch: str = ""
    torch_device: str = "cpu"
    present: bool = True
    simulated: bool = False
    memory_bytes: int | None = None
    compile_default: bool = True
    compile_backend: str = "inductor"
    token_buckets: tuple[int, ...] = ()
    graph_capture: bool = False
    activate: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_name("device", self.name)
        _check_name("device kind", self.kind)
        if self.name != self.kind and not self.name.startswith(f"{self.kind}:"):
            raise RecordError(
                f"device {self.name!r} is of kind {self.kind!r}: expected the name {self.kind!r} "
                f"or '{self.kind}:…', as users write it"
            )
        if self.activate is not None:
            _check_target("device", self.name, self.activate)
        if self.token_buckets and list(self.token_buckets) != sorted(set(self.token_buckets)):
            raise RecordError(
                f"device {self.name!r}: token_buckets must rise strictly, got {self.token_buckets}"
            )
        object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a tensor of one role lies in device memory.

    Attributes:
        name: unique name, e.g. `plain`, `kv.blocks_heads_tokens`.
        role: `linear_weight`, `expert_weight`, `kv_block`, `activation` or `embedding`.
        dims: the dims in memory, outermost first: `N` a whole dim, by any name; `N/64` the tiles of
            64 that N is cut into; `64` a dim of that size inside a tile. A size that depends on
            the dtype has a name (`K/x`, `x`). The dims `N/48`, `K/16`, `8`, `24`, `2`, `2` are
            right too: what is inside has to multiply to the tile. LayoutSuite holds packed
            tensors to the number of dims and to their sizes where those are digits.
        pack: lazy target `(logical tensor) -> physical tensor`; None when they are the same.
        unpack: lazy target, the inverse of `pack`.
        facts: sizes that the consumer needs, e.g. `{"block_size": 16}` for `kv_block`.
    """

    name: str
    role: Literal["linear_weight", "expert_weight", "kv_block", "activation", "embedding"]
    dims: tuple[str, ...] = ()
    pack: str | None = None
    unpack: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_name("layout", self.name)
        if self.role not in ROLES:
            raise RecordError(
                f"layout {self.name!r} has role {self.role!r}: one of {', '.join(ROLES)}"
            )
        listed = isinstance(self.dims, tuple)
        if not listed or not all(isinstance(d, str) and _DIM.match(d) for d in self.dims):
            raise RecordError(
                f"layout {self.name!r} has dims {self.dims!r}: expected a tuple of names, sizes "
                "and tiles, e.g. ('N/64', 'K', '64')"
            )
        if (self.pack is None) != (self.unpack is None):
            raise RecordError(
                f"layout {self.name!r} declares only one of pack and unpack: declare both or none"
            )
        for target in filter(None, (self.pack, self.unpack)):
            _check_target("layout", self.name, target)
        object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))


@dataclass(frozen=True, kw_only=True)
class Format:
    """How the numbers of one operand are stored; quantisation is data, not a flag.

    Attributes:
        dtype: storage dtype by torch's name. "fp8" alone is refused: e4m3fn and e4m3fnuz differ.
        logical: what the stored numbers are: `dense`, `fp8_e4m3fn`, `int8`, `int4`, `mxfp4` …
        scale_dtype: dtype of the scales, None when there are none.
        granularity: what shares a scale: `tensor`, `channel` (a row of a weight), `token` (a row
            of an activation), `group:128`, `block:128x128`; None without scales.
        zero_points: whether zero points are stored beside the scales.
        packing: order of codes of less than a storage element: `gptq`, `gptq_v2`, `awq`,
            `compressed_tensors`; empty where there is only one.
    """

    dtype: str
    logical: str = "dense"
    scale_dtype: str | None = None
    granularity: str | None = None
    zero_points: bool = False
    packing: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            hint = "; write float8_e4m3fn or float8_e4m3fnuz" if "8" in self.dtype else ""
            raise RecordError(
                f"format dtype {self.dtype!r} is unknown{hint}: one of {_DTYPE_NAMES}"
            )
        if (self.scale_dtype is None) != (self.granularity is None):
            raise RecordError(
                f"format {self.dtype!r} declares only one of scale_dtype and granularity"
            )

    def __str__(self) -> str:
        """The canonical text, e.g. `int4.awq/group:128/float16/zeros`; `formats.parse` reads it."""
        if self.granularity is None:
            return self.dtype
        code = f"{self.logical}.{self.packing}" if self.packing else self.logical
        zeros = "/zeros" if self.zero_points else ""
        return f"{code}/{self.granularity}/{self.scale_dtype}{zeros}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The static facts of one use of an op: what a kernel is chosen for.

    Attributes:
        op: name of the op.
        dtype: dtype of the activations by torch's name.
        tokens: lowest and highest number of tokens of one call.
        formats: role → Format for operands stored otherwise than densely in `dtype`.
        facts: the op's own keys (hidden, head_size, window …); a key that the op does not
            declare in `Op.keys` is an error when the problem is bound.
    """

    op: str
    dtype: str
    tokens: tuple[int, int] = (1, MOST_TOKENS)
    formats: Mapping[str, Format] = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_name("op", self.op)
        if self.dtype not in DTYPES:
            raise RecordError(
                f"problem for {self.op!r} has dtype {self.dtype!r}: one of {_DTYPE_NAMES}"
            )
        low, high = self.tokens
        if not 0 < low <= high:
            raise RecordError(
                f"problem for {self.op!r} has tokens {self.tokens}: expected 0 < low <= high"
            )
        object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))
        object.__setattr__(self, "formats", MappingProxyType(dict(self.formats)))

    def fact(self, key: str, default: Fact = None) -> Fact:
        """The value of one fact, `default` where the problem does not state it."""
        return self.facts.get(key, default)

    @property
    def key(self) -> str:
        """A text that is equal for equal problems, for caches and fingerprints."""
        formats = {role: str(stored) for role, stored in sorted(self.formats.items())}
        return f"{self.op} {self.dtype} {self.tokens} {formats} {dict(sorted(self.facts.items()))}"

    def __hash__(self) -> int:
        # The fields' own would raise: mappings have none.
        return hash(self.key)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One implementation of one op.

    Attributes:
        op: name of the op; the kernel's callable has that op's signature.
        name: unique over all plugins, e.g. `rms_norm.torch`, `paged_attention.nvidia_tma`.
        target: lazy `package.module:attribute` of the callable; imported when bound.
        device: which devices it serves: `*` (any), `*:triton` (any whose facts state a `triton`),
            a kind (`nvidia`) or kind:arch (`nvidia:sm90`); the most specific wins before rank is
            looked at, and `*:…` is no more specific than `*`.
        dtypes: activation dtypes it takes, by torch's names; empty means any.
        supports: returns None when it can serve a problem, otherwise the reason why not.
        rank: higher wins within the same specificity; a tie is an error.
        form: `traceable` (plain PyTorch, the compiler sees through it) or `opaque` (bound as the
            torch.library op `polysilicon::<op>__<kernel>`).
        tokens: token counts in which measured evidence says that it wins; None means all.
        deterministic: same input, same bits.
        workspace_bytes: scratch memory that it allocates for the largest call, 0 for none.
        fake: lazy target of the shape function; required for opaque kernels.
        layouts: argument → name of the Layout in which this kernel takes it, e.g.
            `{"weight": "acme.tiles"}`; arguments not named are plain. The callable then gets
            the packed tensor as that argument, and its logical shape as one more keyword,
            `<argument>_shape`.
        offline: lazy target `(device: Device) -> Iterable[Compiled]` that compiles the kernel for a
            device that need not be on this machine; None where there is no such compiler.
        note: one line of evidence or a limit, shown by explain().
    """

    op: str
    name: str
    target: str
    device: str = "*"
    dtypes: frozenset[str] = frozenset()
    supports: Supports | None = None
    rank: int = 0
    form: Literal["traceable", "opaque"] = "traceable"
    tokens: tuple[int, int] | None = None
    deterministic: bool = True
    workspace_bytes: int = 0
    fake: str | None = None
    layouts: Mapping[str, str] = field(default_factory=dict)
    offline: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        _check_name("op", self.op)
        _check_name("kernel", self.name)
        _check_target("kernel", self.name, self.target)
        if self.device != "*":
            _check_name("kernel device", self.device.removeprefix("*:"))
        object.__setattr__(self, "dtypes", frozenset(self.dtypes))
        unknown = self.dtypes - DTYPES
        if unknown:
            raise RecordError(
                f"kernel {self.name!r} has unknown dtypes {sorted(unknown)}: one of {_DTYPE_NAMES}"
            )
        if self.form not in ("traceable", "opaque"):
            raise RecordError(
                f"kernel {self.name!r} has form {self.form!r}: expected 'traceable' or 'opaque'"
            )
        if self.form == "opaque" and self.fake is None:
            raise RecordError(
                f"kernel {self.name!r} is opaque and has no fake: name a function 'module:attr'"
            )
        if self.fake is not None:
            _check_target("kernel fake", self.name, self.fake)
        if self.offline is not None:
            _check_target("kernel offline", self.name, self.offline)
        for layout in self.layouts.values():
            _check_name("kernel layout", layout)
        object.__setattr__(self, "layouts", MappingProxyType(dict(self.layouts)))
        if self.tokens is not None and not 0 < self.tokens[0] <= self.tokens[1]:
            raise RecordError(
                f"kernel {self.name!r} has tokens {self.tokens}: expected 0 < low <= high"
            )


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a compiler made of one variant of a kernel for one device, without running it.

    Attributes:
        kernel: name of the kernel.
        variant: what this variant was compiled for, e.g. `head_size 128 bfloat16`.
        seconds: time that the compiler took.
        facts: what the compiler says of it: `registers`, `spills`, `shared_bytes`,
            `matrix_instruction`, `code_bytes` …; whichever the toolchain reports.
        problems: what a gate has against it, one sentence each; empty when it may be used.
    """

    kernel: str
    variant: str
    seconds: float
    facts: Mapping[str, Fact] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_name("kernel", self.kernel)
        object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Which plugin, of which distribution, a record came from; stamped on by core.

    Attributes:
        plugin: name of the plugin's entry point.
        distribution: name of the distribution that declares it.
        version: of the distribution.
    """

    plugin: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, kw_only=True)
class Provided(Generic[Record]):
    """A record together with its origin."""

    record: Record
    origin: Origin
