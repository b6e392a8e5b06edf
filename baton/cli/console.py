"""One readable log from many processes: a coloured name before every line, on one stream.

Owns the layout of a line. Where children log JSON, their lines pass unchanged.
"""

import sys
from typing import TextIO

from rich.console import Console
from rich.text import Text

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")


class MergedLog:
    """`names` fixes the width of the name column and the colours."""

    def __init__(self, names: list[str], raw: bool = False, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._width = max((len(name) for name in (*names, "baton")), default=0)
        self._raw = raw
        self._colours = {
            name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(sorted(names))
        }

    def say(self, name: str, line: str) -> None:
        if self._raw and name != "baton":
            self._console.file.write(line + "\n")
            self._console.file.flush()
            return
        style = self._colours.get(name, "bold")
        prefix = Text(f"{name:<{self._width}} │ ", style=style)
        self._console.print(prefix + Text.from_ansi(line))
