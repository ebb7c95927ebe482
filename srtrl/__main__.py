"""`python -m srtrl` and `torchrun -m srtrl`: the command line."""

from srtrl.cli import main

main()
