"""`python -m baton`: the command line, wherever the package is importable."""

import sys

from baton.cli.main import main

sys.exit(main())
