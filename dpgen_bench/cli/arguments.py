"""The parser of one verb: one line for an error, with a suggestion for a misspelt option or choice."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from dpgen_bench.utils.validation import suggestion


class Parser(argparse.ArgumentParser):
    """A parser that keeps the lines of its texts, refuses abbreviations, and reports errors as one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The parsed arguments, in any order of options and positional ones.

        Raises:
            SystemExit: after help was printed, with status 0; after an error was printed, with status 2.
        """
        options, unknown = self.parse_known_intermixed_args(arguments)
        if unknown:
            names = [name for action in self._actions for name in action.option_strings]
            self.error(f"expected options of this verb, got {unknown[0]}{suggestion(unknown[0].split('=')[0], names)}")
        return options

    def error(self, message: str) -> NoReturn:
        message = message.replace("the following arguments are required: ", "expected ")
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action, f"expected one of {', '.join(map(str, action.choices))}, got {value!r}"
                f"{suggestion(str(value), map(str, action.choices))}"
            )  # fmt: skip
