"""``python -m bp_convert`` is the command ``bp-convert``."""

from bp_convert.cli import main

if __name__ == "__main__":
    main()
