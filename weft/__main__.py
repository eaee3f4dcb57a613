"""`python -m weft`, and so `torchrun --nproc-per-node 4 -m weft generate`."""

from weft.cli import app

if __name__ == "__main__":
    app(prog_name="weft")
