"""`python -m perfed.cli` is the program `perfed`."""

from perfed.cli import main

main()
