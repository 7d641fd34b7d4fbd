"""`load()`: a model and its tokenizer from a folder, a GGUF file or an installed model package."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from polysilicon.devices import find, require_runnable
from polysilicon.errors import DeviceError, LoadError
from polysilicon.loading import packages
from polysilicon.loading.folder import load_folder
from polysilicon.loading.gguf_model import load_gguf

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready to run.

    Attributes:
        model: an ordinary Transformers model in evaluation mode.
        tokenizer: None where the source carries none.
        config: the model's config.
        name: short name for listings.
        chat_template: whether the tokenizer has a chat template.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    config: PreTrainedConfig
    name: str
    chat_template: bool


def load(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    progress: bool = True,
) -> Loaded:
    """Loads a causal LM and its tokenizer; never uses the network.

    Args:
        name_or_path: `smollm2`, `gemma3-270m`, a Hugging Face folder, or a `.gguf` file.
        dtype: dtype of the weights; GGUF blocks are dequantised to it.
        device: device that the model is moved to, as torch or `polysilicon devices` names it.
        trust_remote_code: run Python code that the folder itself carries.
        allow_pickle: read pickled `.bin` weights, which can run code when opened.
        progress: show a bar on standard error where that is a terminal.

    Raises:
        LoadError: something about the files; the text says what to do.
        ValueError: there is no such dtype.
        DeviceError: the device is unknown or absent.
    """
    wanted, target = _dtype(dtype), _device(device)
    source = _source(name_or_path)
    with _progress(progress, source) as on_bytes:
        if source.is_dir():
            model, tokenizer = load_folder(
                source,
                wanted,
                on_bytes,
                trust_remote_code=trust_remote_code,
                allow_pickle=allow_pickle,
            )
        else:
            model, tokenizer = load_gguf(source, wanted, on_bytes)
    name = str(name_or_path) if str(name_or_path) in packages.KNOWN else source.stem
    return Loaded(
        model=model.to(target),
        tokenizer=tokenizer,
        config=model.config,
        name=name,
        chat_template=bool(tokenizer is not None and tokenizer.chat_template),
    )


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    wanted = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if wanted is None or wanted not in DTYPES.values():
        raise ValueError(
            f"dtype {dtype!r} is not one that a model can run in: one of {', '.join(DTYPES)}"
        )
    return wanted


def _device(device: str | torch.device) -> torch.device:
    """The torch device of a torch name (`cuda:0`) or of a device that a plugin found (`spyre`)."""
    try:
        target = torch.device(device)
    except RuntimeError:
        target = torch.device(require_runnable(find(str(device))).torch_device)
    try:
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(
            f"torch cannot use device {str(device)!r} here ({str(error).splitlines()[0]}): "
            "`polysilicon devices` lists what there is"
        ) from None
    return target


def _source(name_or_path: str | os.PathLike[str]) -> Path:
    if str(name_or_path) in packages.KNOWN:
        return packages.model_file(str(name_or_path))
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        # Also where a path was meant: the text names both kinds.
        return packages.model_file(str(name_or_path))
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "config.json").exists() or not ggufs:
        return path
    if len(ggufs) > 1:
        raise LoadError(
            f"{path} holds {len(ggufs)} GGUF files: name one of {', '.join(f.name for f in ggufs)}"
        )
    return ggufs[0]


@contextlib.contextmanager
def _progress(wanted: bool, source: Path) -> Iterator[Callable[[int], None]]:
    """Yields what the reader calls with each number of bytes it has read."""
    if not wanted or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    files = [source] if source.is_file() else [*source.glob("*.safetensors"), *source.glob("*.bin")]
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(source.name, total=sum(file.stat().st_size for file in files))
        yield lambda count: bar.advance(task, count)
