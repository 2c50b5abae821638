"""Entry point of ``glscert`` and ``python -m glscert``."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

COMMANDS = {
    "train": "Train a network with certified training.",
    "certify": "Certify a network sample by sample, or decide properties of it.",
    "bench": "Run a suite of trainings and certifications and write its report.",
    "tune": "Search a method's settings for its front of natural and certified accuracy.",
    "collect": "Keep a certified run's raw outcome as one small file.",
    "export": "Write a network as ONNX and its properties as VNN-LIB.",
    "zoo": "List the certified networks that come with the package.",
    "config": "Show presets and configurations.",
    "doctor": "Check the installation by computing small bounds.",
}


class LazyGroup(click.Group):
    """Commands are imported when they are used, so that --help answers at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f".{name}", __package__)
        command: click.Command = getattr(module, name)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS:
            from difflib import get_close_matches

            close = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"no command {args[0]!r}: expected one of {', '.join(COMMANDS)}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import version

        click.echo(f"glscert {version('gls-lirpa')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
@click.option("--debug", is_flag=True, help="Show tracebacks and the output of libraries.")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Certified training and certification with tight convex relaxations."""
    ctx.obj = {"debug": debug}


def run() -> None:
    """Run the command line; errors meant for the user become one line and a non-zero exit code."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if debug:
        arguments.insert(0, "--debug")
    else:
        import warnings

        warnings.simplefilter("ignore")
    try:
        main(arguments, prog_name="glscert", standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        if debug:
            raise
        _fail(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except Exception as error:
        if debug or not (_is_ours(error) or isinstance(error, OSError)):
            raise
        _fail(_told(error), 130 if type(error).__name__ == "Interrupted" else 2)


def _is_ours(error: Exception) -> bool:
    # Looked up by name, because importing the package here would slow down every usage error.
    return any(kind.__name__ == "GLSError" for kind in type(error).__mro__)


def _told(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    what = f"{str(error.filename)!r} cannot be read or written: {error.strerror}" if error.filename else str(error)
    return f"{what} (--debug shows where)"


def _fail(message: str, code: int) -> None:
    click.echo(f"glscert: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    run()
