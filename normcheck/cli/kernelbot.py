"""Commands ``normcheck kernelbot``: a problem for the GPU-mode kernel bot whose check is normcheck's."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="Problems for the GPU-mode kernel bot, checked by normcheck.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def _group() -> None:
    pass


@app.command()
def init(
    op: Annotated[str, typer.Argument(metavar="OP", help="rmsnorm, layernorm or fused_add_rmsnorm.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="New folder, beside the bot's eval.py and utils.py.")],
    dtype: Annotated[str, typer.Option("--dtype", help="fp16, bf16 or fp32.")] = "bf16",
) -> None:
    """Write task.yml, task.py, reference.py and template.py of a problem.

    Exit code: 0 written; 2 wrong command line, or DIR exists.
    """
    from normcheck.loaders.kernelbot_folder import write_problem

    names = write_problem(op, folder, dtype)
    typer.echo(f"Written: {folder}: {', '.join(names)}")
