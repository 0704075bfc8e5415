"""`python -m perfed`: the command line."""

from perfed.cli import main

if __name__ == "__main__":
    main()
