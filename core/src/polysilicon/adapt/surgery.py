"""Changes to a model, each with its way back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable


class Surgery:
    """A log of changes; `undo(mark)` takes back all that came after `mark`."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []
        #: original module → the one that stands for it now
        self.replacements: dict[nn.Module, nn.Module] = {}

    @property
    def mark(self) -> int:
        """A point to which `undo` can return."""
        return len(self._steps)

    def undo(self, mark: int = 0) -> None:
        """Takes back the changes made after `mark`, the newest first."""
        while len(self._steps) > mark:
            self._steps.pop()()

    def replace(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Puts `module` where `parent.<name>` was."""
        original = parent._modules[name]
        assert original is not None
        copy_plain_attributes(original, module)
        module.train(original.training)
        parent._modules[name] = module
        self.replacements[original] = module
        self._steps.append(lambda: self._put_back(parent, name, original))

    def _put_back(self, parent: nn.Module, name: str, original: nn.Module) -> None:
        parent._modules[name] = original
        self.replacements.pop(original, None)

    def attach(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Adds a new child; it must own no parameters that the state dict would list twice."""
        assert name not in parent._modules
        module.train(parent.training)
        parent._modules[name] = module
        self._steps.append(lambda: parent._modules.__delitem__(name))

    def before_forward(
        self, module: nn.Module, check: Callable[[nn.Module, Any, dict[str, Any]], None]
    ) -> None:
        """Runs `check(module, args, kwargs)` before every forward of `module`."""
        handle = module.register_forward_pre_hook(check, with_kwargs=True)
        self._steps.append(handle.remove)

    def set_attribute(self, target: object, name: str, value: Any) -> None:
        """Sets an instance attribute, e.g. a module's `forward` or a field of a config."""
        fields = vars(target)
        if name in fields:
            before = fields[name]
            self._steps.append(lambda: fields.__setitem__(name, before))
        else:
            self._steps.append(lambda: fields.__delitem__(name))
        fields[name] = value


def copy_plain_attributes(source: nn.Module, target: nn.Module) -> None:
    """Model code may read `in_features`, `padding_idx` or `config` off the new module."""
    for name, value in vars(source).items():
        own = name.startswith("_") or isinstance(value, (Tensor, nn.Module))
        if not own and not callable(value) and not hasattr(target, name):
            vars(target)[name] = value
