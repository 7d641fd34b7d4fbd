"""The command line. Each module of `polysilicon.commands` adds its own commands to it.

Nothing heavy is imported here or by a command's module: a command imports what it needs when it
runs, so that a listing costs no torch.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from polysilicon import commands
from polysilicon.discovery import Refused, check_requirements, entry_points, switched_off
from polysilicon.errors import PluginError, PolysiliconError, PolysiliconWarning, missing_extra

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

#: A plugin's own command group: `[project.entry-points."polysilicon.commands"]`, a typer app.
COMMANDS_GROUP = "polysilicon.commands"


class _Group(TyperGroup):
    """The top level: core's commands, then the plugins', each loaded when it is looked at."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(_plugin_groups())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in _plugin_groups():
            return own
        command = typer.main.get_command(_plugin_app(cmd_name, *_plugin_groups()[cmd_name]))
        command.name = cmd_name  # whatever the plugin calls its app
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (PolysiliconError, ValueError) as error:
            if ctx.params.get("debug"):
                raise
            typer.secho(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        except ModuleNotFoundError as error:
            told = missing_extra(error)
            if told is None or ctx.params.get("debug"):
                raise
            typer.secho(f"error: {told}", err=True)
            raise typer.Exit(2) from None


def _plugin_groups() -> dict[str, tuple[Distribution, EntryPoint]]:
    """Command groups of installed plugins by name; a name of core's own is never looked up here."""
    found: dict[str, tuple[Distribution, EntryPoint]] = {}
    for distribution, entry_point in entry_points(COMMANDS_GROUP):
        if switched_off(entry_point.name) is None:
            found.setdefault(entry_point.name, (distribution, entry_point))
    return found


def _plugin_app(name: str, distribution: Distribution, entry_point: EntryPoint) -> typer.Typer:
    """A plugin's typer app; where it can't be had, one whose only command says why."""
    try:
        check_requirements(distribution)
        loaded = entry_point.load()
    except Refused as why:
        return _failing(name, distribution, f"{why.reason}. What to do: {why.remedy}")
    except (Exception, SystemExit) as error:
        reason = f"importing it failed: {type(error).__name__}: {error}"
        return _failing(name, distribution, reason)
    if not isinstance(loaded, typer.Typer):
        came = type(loaded).__name__
        return _failing(name, distribution, f"{entry_point.value} is a {came}, not a typer app")
    return loaded


def _failing(name: str, distribution: Distribution, reason: str) -> typer.Typer:
    whose = f"{distribution.metadata['Name']} {distribution.version}"
    message = f"the commands of {whose} can't run: {reason}"
    stand_in = typer.Typer()

    # Any further argument is accepted, so that the reason is what the user reads.
    @stand_in.command(
        name,
        help=f"(unavailable) {message}",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def fail() -> None:
        raise PluginError(message)

    return stand_in


def build(first: str | None = None) -> typer.Typer:
    """The app with the modules of `polysilicon.commands` registered, in alphabetical order.

    Args:
        first: the command line's first word. Where it is a module's name, only that module (and
            those that add to its group, `bench` and `bench_…`) is registered: the others' options
            cost time to set up, and a listing should be instant.
    """
    app = typer.Typer(
        name="polysilicon",
        cls=_Group,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="One set of LLM inference layers that runs at native speed on every chip.",
    )

    @app.callback(invoke_without_command=True)
    def top(
        debug: bool = typer.Option(False, "--debug", help="Show tracebacks of errors."),
        version: bool = typer.Option(False, "--version", help="Print the version and stop."),
    ) -> None:
        del debug  # read from the context where errors are caught
        if version:
            import polysilicon

            typer.echo(f"polysilicon {polysilicon.__version__}")
            raise typer.Exit

    names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    module = (first or "").replace("-", "_")  # the command `new-plugin` is in `new_plugin`
    if module in names:
        names = [name for name in names if name == module or name.startswith(f"{module}_")]
    for name in names:
        importlib.import_module(f"polysilicon.commands.{name}").register(app)
    return app


def _show_warning(
    message: Warning | str, category: type[Warning], *place: Any, **more: Any
) -> None:
    if issubclass(category, PolysiliconWarning):
        sys.stderr.write(f"warning: {message}\n")
    else:
        _python_shows(message, category, *place, **more)


_python_shows: Any = warnings.showwarning


def main() -> None:
    """Entry point of the `polysilicon` command."""
    warnings.showwarning = _show_warning
    warnings.simplefilter("always", PolysiliconWarning)
    build(sys.argv[1] if len(sys.argv) > 1 else None)()
