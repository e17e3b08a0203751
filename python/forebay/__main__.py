"""`python -m forebay`: the `forebay` program."""

from forebay._cli import main

main()
