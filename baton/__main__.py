"""`python -m baton`: the command line, wherever the package is importable."""

from baton.cli.main import main

main()
