"""`python -m millpond`: the same as the `millpond` command."""

from __future__ import annotations

from millpond.cli.main import main

if __name__ == "__main__":
    main()
