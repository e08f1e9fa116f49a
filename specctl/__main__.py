"""Run specctl as `python -m specctl`."""

from specctl.cli.app import main

if __name__ == "__main__":
    main()
