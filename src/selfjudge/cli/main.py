"""The program: its commands, and how errors are printed. Progress goes to stderr, results to stdout; a foreseeable
failure is one line on stderr and exit code 2. An unexpected one is a line and exit code 1."""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperOption

from selfjudge.cli import bench, decode, doctor, evaluate, models, train
from selfjudge.cli.options import with_options
from selfjudge.cli.output import OPTIONS, as_options, warn
from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.store import versions

app = typer.Typer(
    name="selfjudge",
    help="Speculative decoding for language models: lossless by default, and relaxed where the loss is certified on"
    " your own prompts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
COMMANDS: tuple[Callable[..., object], ...] = (
    models.pull, decode.generate, train.distill, models.export, train.label, train.train, evaluate.evaluate,
    evaluate.tune, evaluate.report, evaluate.reproduce, models.ls, decode.serve, bench.bench, bench.demo, doctor.doctor,
)  # fmt: skip
"""In the order of --help."""


class Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does, which takes the last value of an option in silence: say that there were others."""
        *_, order = self.make_parser(ctx).parse_args(args=[*args])
        once = [p.opts[0] for p in order if isinstance(p, TyperOption) and not (p.multiple or p.is_flag)]
        for option, count in Counter(once).items():
            if count > 1 and not ctx.resilient_parsing:
                warn(f"{option} is given {count} times: the last one counts")
        return super().parse_args(ctx, args)


for command in COMMANDS:
    name = "eval" if command is evaluate.evaluate else command.__name__
    app.command(name, cls=Command)(with_options(command))

labels_app = typer.Typer(no_args_is_help=True, help="Label folders.")
labels_app.command("info", cls=Command)(with_options(train.info))
app.add_typer(labels_app, name="labels")

certificate_app = typer.Typer(no_args_is_help=True, help="Certificates of `selfjudge tune`.")
certificate_app.command("verify", cls=Command)(evaluate.verify)
app.add_typer(certificate_app, name="certificate")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"selfjudge {versions().get('selfjudge', '(not installed)')}")
        raise typer.Exit


Asked = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")]


@app.callback()
def _program(version: Asked = False) -> None:
    pass


DEBUG = "SELFJUDGE_DEBUG"  # the variable that shows the traceback of an unexpected error


@cache
def program() -> Any:
    """The commands and their options, built once."""
    return typer.main.get_command(app)


def main() -> None:
    """Entry point: every foreseeable failure is one line and exit code 2, any other one line and 1."""
    OPTIONS.update(_options(program()))
    warnings.formatwarning = lambda message, *_: f"selfjudge: {as_options(str(message))}\n"
    try:
        code = program()(prog_name="selfjudge", standalone_mode=False)
    except SelfJudgeError as error:
        _fail(as_options(str(error)))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a bare `selfjudge` is a question, not a mistake
            print(str(error))
            raise SystemExit(0) from None
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            first = ". ".join(str(error).split(". ")[:2])
            _fail(
                f"{first}: use a smaller --batch where there is one, or a device without other work;"
                " finished parts are kept"
            )
        if hasattr(error, "format_message"):  # typer's usage errors
            if getattr(error, "option_name", "") == "--model" and sys.argv[1] != "train":  # which loads no model
                _fail("there is no option --model: --pair takes an embedded pair, --target any model (see --help)")
            said = error.format_message().removesuffix(".").replace("Value error, ", "").replace("Input should", "must")
            said = said.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
            _fail(f"{said} (see --help)")
        if os.environ.get(DEBUG, "0") not in ("", "0"):
            raise
        _fail(f"unexpected {type(error).__name__}: {first_line(error)} ({DEBUG}=1 shows where it came from)", 1)
    raise SystemExit(code if isinstance(code, int) else 0)  # typer returns 130 after Ctrl-C


def _fail(message: str, code: int = 2) -> NoReturn:
    line = f"selfjudge: {' '.join(message.split())}"
    print(line.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)  # names may hold halves of characters
    raise SystemExit(code) from None


def _options(command: Any) -> Iterator[tuple[str, str]]:
    """(argument, option) of a command and of those below it."""
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield parameter.name, parameter.opts[0]
    for below in getattr(command, "commands", {}).values():
        yield from _options(below)
