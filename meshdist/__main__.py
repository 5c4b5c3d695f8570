"""Run the command ``meshdist`` as ``python -m meshdist``."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
