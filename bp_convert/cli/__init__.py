"""The command ``bp-convert``. Nothing here imports torch before there is work for it."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from bp_convert.cli.app import app
    from bp_convert.cli.session import errors_shown

    with errors_shown():  # of the commands themselves, before and after their work
        app()
