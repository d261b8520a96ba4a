"""`python -m cluster.cli` is `baton`."""

import sys

from cluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
