"""Run the command line: ``python -m mmctl``."""

from mmctl.cli.main import main

if __name__ == "__main__":
    main()
