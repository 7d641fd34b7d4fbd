"""`python -m polysilicon`."""

from polysilicon.cli import main

main()
