"""``python -m meshdist``: the command ``meshdist``."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
