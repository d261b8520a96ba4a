"""`python -m cluster.cli` is `baton`."""

from cluster.cli import run

if __name__ == "__main__":
    run()
