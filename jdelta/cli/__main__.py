"""`python -m jdelta.cli`: the command where its script is not on the path."""

from jdelta.cli import main

main()
