"""`python -m megavm` runs the command `megavm`."""

import sys

from megavm.cli import main

if __name__ == "__main__":
    sys.exit(main())
