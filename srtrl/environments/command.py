"""`srtrl tool`: run what a policy's tool call would run, by hand."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from srtrl.environments.python_sandbox import PythonSandbox, SandboxKind, SandboxLimits

app = typer.Typer(help="Run a tool by hand.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _tools() -> None:
    """Run a tool by hand, in the sandbox in which it runs for a policy."""


@app.command("python")
def python(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="The code; - reads standard input.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    sandbox: Annotated[SandboxKind, typer.Option(help="none runs the code without protection.")] = "auto",
) -> None:
    """Run Python code in the sandbox.

    Exit code 0: the code ended without an error; 1: with one, or a limit ended it.
    """
    if file != "-" and not Path(file).is_file():
        raise ValueError(f"tool python: {file} is not a file; give the path of a file with Python code, or -")
    source = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    with PythonSandbox(SandboxLimits(), num_workers=1, sandbox=sandbox) as pool:
        result = pool.run(source.decode("utf-8", "surrogateescape"))
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        sys.stdout.write(result.stdout)
        sys.stderr.write(result.stderr)
        if result.status not in ("ok", "error"):
            truncated = ", output truncated" if result.is_truncated else ""
            print(f"{result.status} after {result.seconds:.1f} seconds{truncated}", file=sys.stderr)
    raise typer.Exit(0 if result.status == "ok" else 1)
