"""The program: its verbs, and its exit codes.

Exit codes: 0 done, 1 the run failed, 2 wrong usage or file, 3 a stated threshold was missed, 130 interrupted.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import typer

from stagewright import __version__
from stagewright.cli.command import Verb
from stagewright.cli.fabric.fabric import fabric
from stagewright.cli.model.codecs import codecs
from stagewright.cli.model.doctor import doctor
from stagewright.cli.model.models import models
from stagewright.cli.model.profile import profile
from stagewright.cli.model.split import split
from stagewright.cli.planning.explain import explain
from stagewright.cli.planning.fit import fit
from stagewright.cli.planning.forecast import forecast
from stagewright.cli.planning.plan import plan
from stagewright.cli.results.report import report
from stagewright.cli.results.runs import runs
from stagewright.cli.results.trace import trace
from stagewright.cli.results.watch import watch
from stagewright.cli.running.attach import attach
from stagewright.cli.running.compare import compare
from stagewright.cli.running.run import run
from stagewright.cli.running.train import train
from stagewright.cli.running.verify import verify
from stagewright.cli.running.worker import worker
from stagewright.cli.study import study
from stagewright.cli.usage import is_usage_error, usage_sentence
from stagewright.display import printable
from stagewright.errors import StagewrightError

app = typer.Typer(
    name="stagewright",
    help="Parallelize a PyTorch model on the devices you have: plan, run, verify, and see where the time goes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
GROUPS: dict[str, tuple[Any, ...]] = {
    "Look at a model and this machine": (models, doctor, profile, split, codecs),
    "Choose a strategy": (compare, fit, forecast, plan, study),
    "Train and run": (train, run, worker, verify, attach, fabric),
    "See results": (runs, trace, explain, report, watch),
}
"""Verbs in the groups of `stagewright --help`."""

for title, verbs in GROUPS.items():
    for verb in verbs:
        if isinstance(verb, typer.Typer):
            for command in verb.registered_commands:
                command.cls = Verb
            app.add_typer(verb, rich_help_panel=title)
        else:
            app.command(cls=Verb, rich_help_panel=title)(verb)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"stagewright {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """Handle the options before a verb."""


def main() -> None:
    """Run the command line; an expected error ends it with one sentence."""
    try:
        code = app(prog_name="stagewright", standalone_mode=False)
    except StagewrightError as error:
        print(f"stagewright: {printable(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of our output has closed it
        sys.exit(1)
    except Exception as error:
        full = _out_of_memory(error)
        if full is not None:
            print(f"stagewright: {full}", file=sys.stderr)
            sys.exit(full.exit_code)
        if not is_usage_error(error):
            raise
        if type(error).__name__ != "NoArgsIsHelpError":  # typer has shown the help
            print(f"stagewright: {printable(usage_sentence(error))}", file=sys.stderr)
        sys.exit(2)
    finally:
        gc.freeze()  # otherwise the last collection scans all imported modules for a second
    if code == 130:  # typer returns it for Ctrl-C without a message
        print("stagewright: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _out_of_memory(error: Exception) -> StagewrightError | None:
    """Return an out-of-memory error of torch as a StagewrightError; None for any other error."""
    if "torch" not in sys.modules:
        return None
    from stagewright.machine.out_of_memory import oom_error

    return oom_error(error, who="stagewright", doing=" ".join(sys.argv[1:2]))
