"""python -m mlxmoe: the same as the mlxmoe command."""

from mlxmoe.cli.main import main

if __name__ == "__main__":
    main()
