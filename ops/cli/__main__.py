"""Entry point of `python -m ops.cli`: runs `triolet` from a checkout that is not installed."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
