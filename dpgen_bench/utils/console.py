"""The console that commands print on: rich's, which leaves a closed pipe to the command line."""

from __future__ import annotations

from rich import console


class Console(console.Console):
    """Raises BrokenPipeError if the reader of the output has ended; rich itself would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
